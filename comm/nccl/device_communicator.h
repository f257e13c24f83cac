// DeviceCommunicator: the collectives of ranks that have a device each, over a
// backend of c10d that works on tensors of that device: NCCL, or what stands in
// its place in tests. Tensors of other devices are copied there and back.
//
// Simple, not yet fast: the communication thread waits for the end of each
// before it begins the next. With each goes a small all-gather of what the
// ranks are in, see the .cc.
//
// A backend that cannot be aborted within `abort_patience` after a failure
// never will: the process logs the failure and ends, with exit code 1.
#ifndef COMM_NCCL_DEVICE_COMMUNICATOR_H_
#define COMM_NCCL_DEVICE_COMMUNICATOR_H_

#include <functional>
#include <memory>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/communicator.h"
#include "comm/group_options.h"
#include "comm/watch/failure_domain.h"
#include "comm/watch/wait_monitor.h"

namespace c10d {
class Backend;
}

namespace tessera {

struct DeviceCommunicatorOptions : GroupOptions {
  at::Device device = at::kCPU;  // this rank's
  std::string backend;           // for messages: "nccl"
  // sum [S] = the slices of `slices` [W*S] in rank order, divided, as
  // comm/communicator.h says; on the current stream. Null: the backend sums, in
  // an order of its own.
  std::function<absl::Status(const at::Tensor& slices, double divisor,
                             const at::Tensor& sum)>
      ordered_sum;
  absl::Duration abort_patience = kAbortGrace;
};

// As `ordered_sum`, of any dtype and device, one slice after the other.
void AddSlices(const at::Tensor& slices, double divisor, const at::Tensor& sum);

// `backend` is connected, and no other uses it. LOCAL.
std::shared_ptr<Communicator> MakeDeviceCommunicator(
    const DeviceCommunicatorOptions& options,
    std::shared_ptr<FailureDomain> domain,
    c10::intrusive_ptr<c10d::Backend> backend);

}  // namespace tessera
#endif  // COMM_NCCL_DEVICE_COMMUNICATOR_H_
