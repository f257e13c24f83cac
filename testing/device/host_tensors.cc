#include "testing/device/host_tensors.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/CPUAllocator.h"
#include "c10/core/TensorImpl.h"
#include "testing/device/test_device.h"
#include "testing/device/torch_parts.h"

namespace testdevice {
namespace {

at::Tensor TensorOver(const c10::Storage& storage, c10::DispatchKey key,
                      const at::Tensor& like) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  c10::TensorImpl* const impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(),
                              like.storage_offset());
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  return made;
}

const char* DataOf(const at::Tensor& t) {
  return static_cast<const char*>(t.storage().data());
}

}  // namespace

Access AccessTo(const at::Tensor& t, bool writes, int argument) {
  if (!t.defined() || t.numel() == 0) return {0, 0, writes, argument};
  int64_t last = t.storage_offset();
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  const auto element = static_cast<int64_t>(t.element_size());
  const auto data = reinterpret_cast<uintptr_t>(DataOf(t));
  return {data + static_cast<uintptr_t>(t.storage_offset() * element),
          data + static_cast<uintptr_t>((last + 1) * element), writes,
          argument};
}

std::string TextOf(const at::Tensor& t) {
  return absl::StrCat(c10::toString(t.scalar_type()), " [",
                      absl::StrJoin(t.sizes(), ", "), "]");
}

c10::Storage HostTensors::StorageOver(const c10::Storage& storage) {
  const auto known = storages_.find(storage.unsafeGetStorageImpl());
  if (known != storages_.end()) return known->second;
  const size_t bytes = storage.nbytes();
  c10::DataPtr data;
  if (memory_ == Memory::kOver && bytes > 0) {
    data = {OnHost(storage.mutable_data()), at::kCPU};
  } else {
    data = c10::GetCPUAllocator()->allocate(bytes);
    if (bytes > 0) std::fill_n(static_cast<char*>(data.get()), bytes, 0);
  }
  // A storage without memory may grow: it is an out= argument.
  c10::Storage host(c10::Storage::use_byte_size_t(), bytes, std::move(data),
                    bytes == 0 ? c10::GetCPUAllocator() : nullptr,
                    /*resizable=*/bytes == 0);
  storages_.emplace(storage.unsafeGetStorageImpl(), host);
  return host;
}

at::Tensor HostTensors::Of(const at::Tensor& t) {
  TORCH_CHECK(t.layout() == at::kStrided, "test device: only strided tensors");
  for (const auto& [of_device, host] : pairs_) {
    if (of_device.is_same(t)) return host;
  }
  at::Tensor host =
      TensorOver(StorageOver(t.storage()), c10::DispatchKey::CPU, t);
  pairs_.emplace_back(t, host);
  return host;
}

at::Tensor HostTensors::Alias(const at::Tensor& result) const {
  for (const auto& [of_device, host] : pairs_) {
    if (host.is_same(result)) return of_device;
  }
  for (const auto& [of_device, host] : pairs_) {
    if (result.storage().is_alias_of(host.storage()) && result.numel() > 0) {
      return OnDevice(of_device.storage(), result);
    }
  }
  return {};
}

std::vector<std::pair<at::Tensor, at::Tensor>> HostTensors::Grown() const {
  std::vector<std::pair<at::Tensor, at::Tensor>> grown;
  for (const auto& [of_device, host] : pairs_) {
    if (!host.sizes().equals(of_device.sizes()) && host.numel() > 0) {
      grown.emplace_back(of_device, host);
    }
  }
  return grown;
}

at::Tensor OnDevice(const c10::Storage& storage, const at::Tensor& like) {
  return TensorOver(storage, c10::DispatchKey::PrivateUse1, like);
}

at::Tensor NewOnDevice(const at::Tensor& like) {
  const size_t bytes = like.storage().nbytes();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                       GetAllocator()->allocate(bytes), GetAllocator(),
                       /*resizable=*/true);
  return OnDevice(storage, like);
}

}  // namespace testdevice
