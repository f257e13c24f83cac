// DeviceCopies copies batches to a device on a stream of their own, so that
// copies and kernels do not wait for each other.
//
//   copy stream     [batch 1]     [batch 2]
//                        |event        |event
//   current stream  ... '->[step 1]... '->[step 2]
//
// The memory belongs to the copy stream. Finish records on it what a consumer's
// stream still does to the memory when it is freed, so that the allocator waits
// for that.
//
// Threads: the caller serializes the calls.
#ifndef LOADER_DEVICE_COPIES_H_
#define LOADER_DEVICE_COPIES_H_

#include "absl/functional/function_ref.h"
#include "c10/core/Device.h"
#include "c10/core/Stream.h"
#include "loader/batch_maker.h"

namespace tessera {

class DeviceCopies {
 public:
  // Takes a stream of libtorch's pool. REQUIRES: `device` is not the CPU. May
  // throw.
  explicit DeviceCopies(c10::Device device);

  // Copies the tensors that are not on the device, unless that has been done;
  // an error of the device becomes the batch's status. The host waits for
  // copies from memory that is not pinned. ASYNC.
  void Start(DrawnBatch* drawn) const;
  // Orders what this thread's current stream is given from here on after the
  // copies of Start; if the device is lost, that becomes the batch's status.
  void Finish(DrawnBatch* drawn) const;

 private:
  // Runs `body`; what it throws becomes the batch's status.
  void Guarded(DrawnBatch* drawn, absl::FunctionRef<void()> body) const;

  const c10::Stream stream_;
};

}  // namespace tessera
#endif  // LOADER_DEVICE_COPIES_H_
