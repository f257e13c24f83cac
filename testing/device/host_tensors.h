// HostTensors: a call's tensors of the device as CPU tensors over the same
// memory, for the CPU's kernels, and their results as the device's again.
#ifndef TESTING_DEVICE_HOST_TENSORS_H_
#define TESTING_DEVICE_HOST_TENSORS_H_

#include <unordered_map>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "testing/device/order_checker.h"

namespace testdevice {

inline bool IsOfDevice(const at::Tensor& t) {
  return t.defined() && t.device().type() == c10::DeviceType::PrivateUse1;
}

// From the first to the last element of `t`, of a device or pinned.
Access AccessTo(const at::Tensor& t, bool writes, int argument);
// "float [4, 8]".
std::string TextOf(const at::Tensor& t);

class HostTensors {
 public:
  // kOver: the same memory. kZeros: as large, zeros, for a trial of what an
  // operator's results look like.
  enum class Memory { kOver, kZeros };
  explicit HostTensors(Memory memory) : memory_(memory) {}

  // REQUIRES: IsOfDevice(t). The same tensor for the same one, storages shared
  // as they are.
  at::Tensor Of(const at::Tensor& t);

  // What the device's result is if `result` is one that was passed in, or a
  // view of it; else undefined.
  at::Tensor Alias(const at::Tensor& result) const;
  // Tensors that were passed in without elements, and have some now: what the
  // caller's have to become. (out= arguments)
  std::vector<std::pair<at::Tensor, at::Tensor>> Grown() const;

 private:
  c10::Storage StorageOver(const c10::Storage& storage);

  const Memory memory_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;  // device's, host's
  // By the device's.
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_;
};

// A tensor of the device over `storage`, with the geometry of `like`.
at::Tensor OnDevice(const c10::Storage& storage, const at::Tensor& like);
// New memory of the current stream for all of like's storage.
at::Tensor NewOnDevice(const at::Tensor& like);

}  // namespace testdevice
#endif  // TESTING_DEVICE_HOST_TENSORS_H_
