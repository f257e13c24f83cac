// SwapRing: serves a swap file's requests by io_uring. One thread has all the
// slots, queue_depth of them; an eventfd wakes it when there is more to do.
//
// Threads: Run: one. Others: any.
#ifndef OFFLOAD_DISK_SWAP_RING_H_
#define OFFLOAD_DISK_SWAP_RING_H_

#include <liburing.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "offload/disk/swap_file.h"
#include "offload/disk/swap_requests.h"
#include "offload/disk/swap_system.h"

namespace tessera {

class SwapRing {
 public:
  // Makes a ring; null where the kernel has no io_uring, or forbids it. All
  // arguments outlive the ring; `fd` is the swap file. LOCAL.
  static std::unique_ptr<SwapRing> Create(const SwapOptions& options,
                                          SwapSystem* system, int fd,
                                          SwapRequests* requests);
  // REQUIRES: Run has returned, or was never called.
  ~SwapRing();
  SwapRing(const SwapRing&) = delete;
  SwapRing& operator=(const SwapRing&) = delete;

  // Serves the requests until they are stopped and all have ended.
  void Run();
  // Wakes Run's thread; call it after Enqueue, and after Stop.
  void Wake();

  // Carry out SwapFile's calls of the same names.
  bool Register(void* memory, int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  void Unregister(void* memory) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether any memory is registered.
  bool HasRegistered() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Range {
    int64_t bytes;
    int index;
  };

  SwapRing(const SwapOptions& options, SwapSystem* system, int fd,
           SwapRequests* requests)
      : options_(options), system_(system), fd_(fd), requests_(requests) {}
  bool Start();
  void Submit(size_t slot);
  // Gives idle slots blocks, as many as there are.
  void FillRing(std::vector<size_t>* idle, bool* stopping);
  // Returns the registered buffer of a memory; -1: it is not registered.
  int BufferOf(const char* memory, int64_t bytes) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  bool UpdateBuffer(int index, const iovec& range);

  const SwapOptions& options_;
  SwapSystem* const system_;
  const int fd_;
  SwapRequests* const requests_;

  bool has_ring_ = false;
  io_uring ring_ = {};
  int wake_fd_ = -1;
  // Used by Run's thread only.
  uint64_t wakes_ = 0;  // where the kernel puts what it reads from wake_fd_
  std::deque<SwapSlot> slots_;

  mutable absl::Mutex mutex_;
  std::map<const char*, Range> ranges_ ABSL_GUARDED_BY(mutex_);
  std::vector<int> free_buffers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // OFFLOAD_DISK_SWAP_RING_H_
