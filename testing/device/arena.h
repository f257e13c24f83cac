// Arena is the memory of the devices. Its addresses are reserved and cannot be
// accessed: following a device's pointer on the host ends in SIGSEGV, as with
// any device. The bytes are at another address, OnHost.
//
//   device addresses  [ device 0 ........ | device 1 ........ ]   no access
//   the host's        [ device 0 ........ | device 1 ........ ]   the bytes
//
// Freed blocks go back to the stream that allocated them, and are given out
// again, the last one first. The caller poisons new and freed memory with bytes
// of ones (NaN in any floating-point dtype), in the order of the stream.
// Threads: any.
#ifndef TESTING_DEVICE_ARENA_H_
#define TESTING_DEVICE_ARENA_H_

#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace testdevice {

class Arena {
 public:
  static constexpr int64_t kAlignment = 512;  // bytes, as CUDA's allocator

  explicit Arena(int devices);

  // Allocates a multiple of kAlignment bytes. Returns 0 if the device has no
  // more.
  uintptr_t Allocate(int device, int stream, int64_t bytes);
  // Frees what Allocate returned; its bytes may be given out again.
  void Free(uintptr_t begin);
  int64_t BytesOf(uintptr_t begin) const;
  int StreamOf(uintptr_t begin) const;

  // Returns -1 for an address of no device.
  int DeviceOf(const void* address) const;
  uintptr_t OnHost(uintptr_t address) const { return address + to_host_; }

  // Bytes in blocks that are not freed, now and at most since ResetPeak, and
  // bytes in all blocks.
  struct Held {
    int64_t allocated = 0, peak = 0, reserved = 0;
  };
  Held held(int device) const;
  void ResetPeak(int device);
  // Gives up the free blocks of all devices. Their addresses are not used
  // again.
  void ReturnFree();
  // Refuses to hold more than `bytes`; unlimited by default.
  void SetLimit(int device, int64_t bytes);

 private:
  struct Device {
    uintptr_t begin = 0, next = 0, end = 0;
    Held held;
    int64_t limit = INT64_MAX;
    // Free blocks by stream and bytes.
    std::map<std::pair<int, int64_t>, std::vector<uintptr_t>> free;
  };
  struct Block {
    int device = 0, stream = 0;
    int64_t bytes = 0;
  };

  const int devices_;
  uintptr_t begin_ = 0, to_host_ = 0;
  mutable absl::Mutex mutex_;
  std::vector<Device> each_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<uintptr_t, Block> blocks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace testdevice
#endif  // TESTING_DEVICE_ARENA_H_
