// HostTensors represents a call's device tensors as CPU tensors over the same
// memory, for the CPU's kernels, and turns their results into device tensors
// again.
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

// Returns the access to all from the first to the last element of `t`, a tensor
// of a device or pinned.
Access AccessTo(const at::Tensor& t, bool writes, int argument);
// Returns "float [4, 8]".
std::string TextOf(const at::Tensor& t);

class HostTensors {
 public:
  // kOver: the same memory. kZeros: zeros of the same size, to find out what an
  // operator's results look like.
  enum class Memory { kOver, kZeros };
  explicit HostTensors(Memory memory) : memory_(memory) {}

  // Returns the host tensor of `t`: always the same one for a tensor, with
  // storages shared as on the device. REQUIRES: IsOfDevice(t).
  at::Tensor Of(const at::Tensor& t);

  // Returns the device's result if `result` is a tensor that was passed in, or
  // a view of one; undefined otherwise.
  at::Tensor Alias(const at::Tensor& result) const;
  // Returns tensors that were passed in without elements and have some now,
  // with what the caller's must become (out= arguments).
  std::vector<std::pair<at::Tensor, at::Tensor>> Grown() const;

 private:
  c10::Storage StorageOver(const c10::Storage& storage);

  const Memory memory_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;  // device's, host's
  // The keys are the device's storages.
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_;
};

// Returns a device tensor over `storage`, with the geometry of `like`.
at::Tensor OnDevice(const c10::Storage& storage, const at::Tensor& like);
// Allocates memory of the current stream for all of like's storage.
at::Tensor NewOnDevice(const at::Tensor& like);

}  // namespace testdevice
#endif  // TESTING_DEVICE_HOST_TENSORS_H_
