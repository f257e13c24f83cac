#include "sharding/trace/meta_call.h"

#include <utility>

#include "ATen/ops/zeros.h"
#include "c10/core/Allocator.h"
#include "c10/core/TensorImpl.h"
#include "sharding/dispatch/stack_tensors.h"

namespace tessera {
namespace {

c10::Storage MetaStorage(size_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                      c10::DataPtr(nullptr, at::Device(at::kMeta)),
                      c10::GetAllocator(at::kMeta), /*resizable=*/true);
}

// A tensor over `storage` that lies there as `like` does over its own.
at::Tensor TensorOver(c10::Storage storage, c10::DispatchKey key,
                      const at::Tensor& like) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  c10::TensorImpl* const impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(),
                              like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

}  // namespace

MetaCall::MetaCall(const torch::jit::Stack& stack, size_t n, int device) {
  arguments_.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    if (static_cast<int>(i) == device) {
      arguments_.emplace_back(at::Device(at::kMeta));
    } else {
      arguments_.push_back(
          WithTensors(stack[stack.size() - n + i],
                      [this](const at::Tensor& t) { return TwinOf(t); }));
    }
  }
}

at::Tensor MetaCall::TwinOf(const at::Tensor& original) {
  if (!original.defined()) return original;
  const Twin* shares = nullptr;
  for (const Twin& twin : twins_) {
    if (twin.original.is_same(original)) return twin.meta;
    if (StorageOf(twin.original) == StorageOf(original)) shares = &twin;
  }
  c10::Storage storage = shares != nullptr
                             ? c10::Storage(shares->meta.storage())
                             : MetaStorage(original.storage().nbytes());
  at::Tensor meta =
      TensorOver(std::move(storage), c10::DispatchKey::Meta, original);
  twins_.push_back({original, meta});
  return meta;
}

torch::jit::Stack MetaCall::OnZeros() {
  std::vector<std::pair<const c10::StorageImpl*, c10::Storage>> made;
  std::vector<Twin> on_zeros;
  for (const Twin& twin : twins_) {
    c10::Storage storage;
    for (const auto& [of, zeros] : made) {
      if (of == StorageOf(twin.meta)) storage = zeros;
    }
    if (!storage) {
      storage = at::zeros({static_cast<int64_t>(twin.meta.storage().nbytes())},
                          at::kByte)
                    .storage();
      made.emplace_back(StorageOf(twin.meta), storage);
    }
    on_zeros.push_back(
        {twin.original,
         TensorOver(std::move(storage), c10::DispatchKey::CPU, twin.meta)});
  }
  torch::jit::Stack values;
  for (const c10::IValue& argument : arguments_) {
    values.push_back(WithTensors(argument, [&](const at::Tensor& meta) {
      const Twin* const twin = meta.defined() ? Find(meta) : nullptr;
      return twin == nullptr
                 ? meta
                 : on_zeros[static_cast<size_t>(twin - twins_.data())].meta;
    }));
  }
  twins_ = std::move(on_zeros);
  return values;
}

const MetaCall::Twin* MetaCall::Find(const at::Tensor& meta) const {
  for (const Twin& twin : twins_) {
    if (twin.meta.is_same(meta)) return &twin;
  }
  return nullptr;
}

const MetaCall::Twin* MetaCall::FindStorage(const at::Tensor& meta) const {
  for (const Twin& twin : twins_) {
    if (StorageOf(twin.meta) == StorageOf(meta)) return &twin;
  }
  return nullptr;
}

at::Tensor OnCpu(const at::Tensor& like, c10::Storage storage) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(
      like.sizes(), like.strides(), like.storage_offset());
  return made;
}

}  // namespace tessera
