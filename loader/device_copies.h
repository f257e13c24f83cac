// DeviceCopies: batches on their way to a device, on a stream of their own, so
// that they wait for no maths and no maths for them.
//
//   copy stream     [batch 1]     [batch 2]
//                        |event        |event
//   current stream  ... '->[step 1]... '->[step 2]
//
// The memory is the copy stream's: what a consumer's stream still does to it
// when it is freed is recorded at Finish, for the allocator to wait for.
//
// Threads: outside order.
#ifndef LOADER_DEVICE_COPIES_H_
#define LOADER_DEVICE_COPIES_H_

#include "absl/functional/function_ref.h"
#include "c10/core/Device.h"
#include "c10/core/Stream.h"
#include "loader/batch_maker.h"

namespace tessera {

class DeviceCopies {
 public:
  // Takes a stream of libtorch's pool. REQUIRES: not the CPU. May throw.
  explicit DeviceCopies(c10::Device device);

  // Copies the tensors that are not on the device, unless that has been done;
  // what the device refuses becomes the batch's status. From memory that is not
  // pinned the host waits. ASYNC.
  void Start(DrawnBatch* drawn) const;
  // What this thread's current stream is given from here on comes after the
  // copies of Start; if the device is lost that is the batch's status.
  void Finish(DrawnBatch* drawn) const;

 private:
  // What `body` throws becomes the batch's status.
  void Guarded(DrawnBatch* drawn, absl::FunctionRef<void()> body) const;

  const c10::Stream stream_;
};

}  // namespace tessera
#endif  // LOADER_DEVICE_COPIES_H_
