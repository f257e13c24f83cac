// TensorPlace: all of a plain tensor but its memory: which part of a storage it
// is, and how it is read.
#ifndef BASE_TORCH_PLACED_TENSOR_H_
#define BASE_TORCH_PLACED_TENSOR_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "c10/core/DispatchKeySet.h"

namespace tessera {

struct TensorPlace {
  TensorPlace() = default;
  // REQUIRES: a strided tensor, with storage.
  explicit TensorPlace(const at::Tensor& tensor);

  // A tensor over `storage`, without history.
  at::Tensor Over(c10::Storage storage) const;
  // Sizes, strides, place and dtype.
  bool SameAs(const TensorPlace& other) const;

  caffe2::TypeMeta dtype;
  c10::DispatchKeySet keys;
  c10::DimVector sizes, strides;
  int64_t offset = 0;
  bool wrapped_number = false;
};

// A tensor that TensorPlace can make again: strided, with storage, and nothing
// besides (nested, quantized, named).
bool IsPlain(const at::Tensor& tensor);
// It, without history, sharing memory and version counter.
at::Tensor AliasOf(const at::Tensor& tensor);

// All of a storage, as bytes.
at::Tensor BytesOf(const c10::Storage& storage);
// A copy of it, under no autograd.
c10::Storage CopyOf(const c10::Storage& storage);

}  // namespace tessera
#endif  // BASE_TORCH_PLACED_TENSOR_H_
