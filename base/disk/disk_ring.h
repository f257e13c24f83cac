// DiskRing lets the kernel read and write while this thread does something
// else, by io_uring. No torch.
//
// Threads: one; Wake and the methods of registered memory: any.
#ifndef BASE_DISK_DISK_RING_H_
#define BASE_DISK_DISK_RING_H_

#include <liburing.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace tessera {

class DiskRing {
 public:
  struct Request {
    bool write = false;
    int fd = -1;
    char* memory = nullptr;
    int64_t bytes = 0;
    int64_t offset = 0;  // in the file
    int buffer = -1;     // BufferOf `memory`
  };
  struct Done {
    size_t tag = 0;      // that of Begin, or kWoken
    int64_t result = 0;  // what FileSystem::Read or Write would return
  };
  static constexpr size_t kWoken = ~size_t{0};

  // Makes a ring of `depth` concurrent requests. Returns null if this kernel
  // has no io_uring or forbids it. LOCAL.
  static std::unique_ptr<DiskRing> Create(unsigned depth);
  // Waits for all requests that have begun. REQUIRES: Listen's Next has
  // returned.
  ~DiskRing();
  DiskRing(const DiskRing&) = delete;
  DiskRing& operator=(const DiskRing&) = delete;

  bool empty() const { return pending_ == 0; }
  // Begins a request, which is submitted by Submit or Next. REQUIRES: fewer
  // than `depth` requests have begun and not been returned; the file and the
  // memory outlive it.
  void Begin(size_t tag, const Request& request);
  // Submits what the kernel takes now.
  void Submit() { (void)io_uring_submit(&ring_); }
  // Returns whether Next would return without waiting.
  bool Ready() { return io_uring_cq_ready(&ring_) > 0; }
  // Returns the next request that is done, in any order, or kWoken. REQUIRES:
  // not empty, or Listen was called. Blocking.
  Done Next();

  // Makes a Next return kWoken once Wake is called, or if it has been since the
  // last kWoken.
  void Listen();
  void Wake();

  // Registers memory, so that the kernel maps it once. A hint; false where that
  // is not allowed (RLIMIT_MEMLOCK). REQUIRES of Unregister: no request on it
  // is under way.
  bool Register(char* memory, int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  void Unregister(char* memory) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether any memory is registered.
  bool HasRegistered() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns the registered buffer of a memory; -1: it is not registered.
  int BufferOf(const char* memory, int64_t bytes) const
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Range {
    int64_t bytes;
    int index;
  };

  DiskRing() = default;
  bool Start(unsigned depth);
  io_uring_sqe* NextEntry();
  bool UpdateBuffer(int index, const iovec& range);

  bool has_ring_ = false;
  io_uring ring_ = {};
  size_t pending_ = 0;
  int wake_fd_ = -1;
  uint64_t wakes_ = 0;  // where the kernel puts what it reads from wake_fd_

  mutable absl::Mutex mutex_;
  std::map<const char*, Range> ranges_ ABSL_GUARDED_BY(mutex_);
  std::vector<int> free_buffers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // BASE_DISK_DISK_RING_H_
