// DeviceTransport: the collectives of ranks that have a device each, over a
// backend of c10d that works on tensors of that device: NCCL, or what stands in
// its place.
//
//   communication thread    the ranks agree, over the host's transport, that
//                           they are in one collective; it is given to the
//                           device, on a stream, and counts as done
//   streams                 what reads its result comes after it; sums may have
//                           one of their own, beside gathers
//   "tessera-device"        watches its end: errors of the device, the end of
//                           a rank's process, the timeout
//
// No thread of the program waits for the device. Tensors of the CPU, and texts,
// go over the host's transport.
//
// A backend that cannot be aborted within `abort_patience` after a failure
// never will: the process logs the failure and ends, with exit code 1.
#ifndef COMM_DEVICE_DEVICE_TRANSPORT_H_
#define COMM_DEVICE_DEVICE_TRANSPORT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/comm_call.h"
#include "comm/transport.h"
#include "comm/watch/wait_monitor.h"

namespace c10d {
class Backend;
}

namespace tessera {

struct DeviceTransportOptions {
  int rank = 0;
  int world_size = 1;
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
  std::function<void(const CommCall& call)> on_agreed;
  // What `ordered_sum` has of the other ranks at a time, in bytes.
  int64_t slices_bytes = int64_t{32} << 20;
  absl::Duration abort_patience = kAbortGrace;
};

// As `ordered_sum`, of any dtype and device, one slice after the other.
void AddSlices(const at::Tensor& slices, double divisor, const at::Tensor& sum);

// `backend` is connected, and no other uses it; `host` connects the same ranks
// and works in host memory. With `sums`, which is another of the kind, sums are
// beside all other collectives; null: they take turns. LOCAL.
std::shared_ptr<Transport> MakeDeviceTransport(
    const DeviceTransportOptions& options, std::shared_ptr<Transport> host,
    c10::intrusive_ptr<c10d::Backend> backend,
    c10::intrusive_ptr<c10d::Backend> sums = nullptr);

}  // namespace tessera
#endif  // COMM_DEVICE_DEVICE_TRANSPORT_H_
