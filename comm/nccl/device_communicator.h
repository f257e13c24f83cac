// DeviceCommunicator: the collectives of ranks that have a device each, over a
// backend of c10d that works on tensors of that device: NCCL, or what stands in
// its place in tests.
//
//   communication thread    the ranks agree, over the host group, that they
//                           are in one collective; it is given to the device,
//                           on a stream, and counts as done
//   streams                 what reads its result comes after it
//   "tessera-device"        watches its end: errors of the device, the end of
//                           a rank's process, the timeout
//
// No thread of the program waits for the device. Tensors of the CPU, and texts,
// go over the host group.
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
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/communicator.h"
#include "comm/group/queued_communicator.h"
#include "comm/group_options.h"
#include "comm/watch/failure_domain.h"
#include "comm/watch/wait_monitor.h"

namespace c10d {
class Backend;
}

namespace tessera {

struct DeviceCommunicatorOptions : GroupOptions {
  at::Device device = at::kCUDA;  // this rank's; not the CPU
  std::string backend;            // for messages: "nccl"
  // sum [S] = the slices of `slices` [W*S] in rank order, divided, as
  // comm/communicator.h says; on the current stream. Null: the backend sums, in
  // an order of its own.
  std::function<absl::Status(const at::Tensor& slices, double divisor,
                             const at::Tensor& sum)>
      ordered_sum;
  // Told of each collective of the device's, once the ranks have agreed that
  // they are in it and before the backend is called; on the same thread. For
  // backends whose hosts meet while they give it to the device.
  std::function<void(const QueuedCommunicator::Call& call)> on_agreed;
  // What `ordered_sum` has of the other ranks at a time, in bytes.
  int64_t slices_bytes = int64_t{32} << 20;
  absl::Duration abort_patience = kAbortGrace;
};

// As `ordered_sum`, of any dtype and device, one slice after the other.
void AddSlices(const at::Tensor& slices, double divisor, const at::Tensor& sum);

// `backend` is connected, and no other uses it; nor `host`, a group of the same
// ranks in `domain`, which works in host memory. LOCAL. ResourceExhausted if
// there is no thread to watch.
absl::StatusOr<std::shared_ptr<Communicator>> MakeDeviceCommunicator(
    const DeviceCommunicatorOptions& options,
    std::shared_ptr<FailureDomain> domain,
    std::shared_ptr<QueuedCommunicator> host,
    c10::intrusive_ptr<c10d::Backend> backend);

}  // namespace tessera
#endif  // COMM_NCCL_DEVICE_COMMUNICATOR_H_
