// What a file compiled with torch_pch = True has read before its first line.
// A file still includes what it uses: this header only makes that cheap.
#ifndef THIRD_PARTY_LIBTORCH_TORCH_PCH_H_
#define THIRD_PARTY_LIBTORCH_TORCH_PCH_H_

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "third_party/absl/absl_pch.h"

// What a precompiled header leaves to each file that uses it: the virtual
// functions of templates whose virtual table something in it refers to. That is
// 1.1 s in every file. Called by name here, they are instantiated once; nobody
// calls this. (-ftime-trace of an empty file shows which there are.)
namespace tessera_pch {

// clone_ is private; so what it does.
template <typename Impl>
void CallClone(Impl& impl) {
  const std::shared_ptr<torch::nn::Module> clone =
      impl.torch::nn::template Cloneable<Impl>::clone();
  impl = *std::dynamic_pointer_cast<Impl>(clone);
}

template <size_t kDims, typename Impl>
void CallConvolution(torch::nn::ConvNdImpl<kDims, Impl>& impl,
                     std::ostream& stream) {
  impl.torch::nn::template ConvNdImpl<kDims, Impl>::reset();
  impl.torch::nn::template ConvNdImpl<kDims, Impl>::pretty_print(stream);
}

template <size_t kDims, typename Impl>
void CallTransposed(torch::nn::ConvTransposeNdImpl<kDims, Impl>& impl,
                    std::ostream& stream) {
  CallConvolution<kDims, Impl>(impl, stream);
  impl.torch::nn::template ConvTransposeNdImpl<kDims, Impl>::pretty_print(
      stream);
}

template <c10::TypeKind kKind, typename Type>
void CallElementType(const c10::SingleElementType<kKind, Type>& type) {
  type.c10::template SingleElementType<kKind, Type>::equals(type);
  type.c10::template SingleElementType<kKind, Type>::hasFreeVariables();
  type.c10::template SingleElementType<kKind, Type>::containedTypes();
}

// As if there were one.
template <typename Type>
Type& One();

template <typename... Impls>
void CallClones() {
  (CallClone(One<Impls>()), ...);
}

inline void CallAll(std::ostream& stream) {
  namespace nn = torch::nn;
  CallClones<
      nn::AdaptiveLogSoftmaxWithLossImpl, nn::BilinearImpl, nn::Conv1dImpl,
      nn::Conv2dImpl, nn::Conv3dImpl, nn::ConvTranspose1dImpl,
      nn::ConvTranspose2dImpl, nn::ConvTranspose3dImpl, nn::CrossMapLRN2dImpl,
      nn::EmbeddingBagImpl, nn::EmbeddingImpl, nn::FoldImpl,
      nn::FractionalMaxPool2dImpl, nn::FractionalMaxPool3dImpl, nn::GRUCellImpl,
      nn::GRUImpl, nn::GroupNormImpl, nn::LSTMCellImpl, nn::LSTMImpl,
      nn::LayerNormImpl, nn::LinearImpl, nn::LocalResponseNormImpl,
      nn::LogSoftmaxImpl, nn::ModuleDictImpl, nn::MultiheadAttentionImpl,
      nn::ParameterDictImpl, nn::RNNCellImpl, nn::RNNImpl, nn::SequentialImpl,
      nn::SoftmaxImpl, nn::SoftminImpl, nn::ThresholdImpl,
      nn::TransformerDecoderImpl, nn::TransformerDecoderLayerImpl,
      nn::TransformerEncoderImpl, nn::TransformerEncoderLayerImpl,
      nn::UnflattenImpl, nn::UnfoldImpl>();
  CallConvolution<1>(One<nn::Conv1dImpl>(), stream);
  CallConvolution<2>(One<nn::Conv2dImpl>(), stream);
  CallConvolution<3>(One<nn::Conv3dImpl>(), stream);
  CallTransposed<1>(One<nn::ConvTranspose1dImpl>(), stream);
  CallTransposed<2>(One<nn::ConvTranspose2dImpl>(), stream);
  CallTransposed<3>(One<nn::ConvTranspose3dImpl>(), stream);
  CallElementType<c10::TypeKind::ListType>(One<c10::ListType>());
  CallElementType<c10::TypeKind::FutureType>(One<c10::FutureType>());
  CallElementType<c10::TypeKind::AwaitType>(One<c10::AwaitType>());
  CallElementType<c10::TypeKind::RRefType>(One<c10::RRefType>());
  using Tensors = torch::data::datasets::TensorDataset;
  using Batches =
      torch::data::datasets::Dataset<Tensors, torch::data::TensorExample>;
  One<Tensors>().Batches::get_batch({});
}

}  // namespace tessera_pch

#endif  // THIRD_PARTY_LIBTORCH_TORCH_PCH_H_
