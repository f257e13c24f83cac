// SwapRequests: queues the reads and writes of a swap file. A request is cut
// into blocks; a block is in a slot while it is under way, whatever talks to
// the disk:
//
//   Enqueue --> queue_ --Cut, Prepare--> SwapSlot --> the disk --> Landed --+->
//                                           ^                               |
//                                           +----- the rest of the block ---+
//
// The last block that has landed, or the first error, ends the request.
//
// Threads: any; a slot is one thread's at a time.
#ifndef OFFLOAD_DISK_SWAP_REQUESTS_H_
#define OFFLOAD_DISK_SWAP_REQUESTS_H_

#include <stdlib.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "offload/disk/swap_checksums.h"
#include "offload/disk/swap_file.h"

namespace tessera {

// Round to multiples of kSwapAlignment.
inline int64_t SwapRoundDown(int64_t bytes) {
  return bytes / kSwapAlignment * kSwapAlignment;
}
inline int64_t SwapRoundUp(int64_t bytes) {
  return SwapRoundDown(bytes + kSwapAlignment - 1);
}
inline bool SwapAligned(const void* memory) {
  return reinterpret_cast<uintptr_t>(memory) % kSwapAlignment == 0;
}

struct SwapFuture::State {
  // The request, constant.
  bool write = false;
  bool urgent = false;
  char* memory = nullptr;
  int64_t begin = 0;  // in the file
  int64_t bytes = 0;
  std::string what;
  std::shared_ptr<std::atomic<int64_t>> waited_ns;
  int64_t enqueued = 0;  // TraceNow(), where a trace is recorded

  // Guarded by SwapRequests' mutex.
  int64_t cut = 0;  // bytes that have become blocks
  int under_way = 0;
  absl::Status error;  // the first

  mutable absl::Mutex mutex;
  bool done ABSL_GUARDED_BY(mutex) = false;
  absl::Status status ABSL_GUARDED_BY(mutex);
};

// A block of a request, while it is under way.
struct SwapSlot {
  std::shared_ptr<SwapFuture::State> request;
  char* user = nullptr;    // the request's memory
  char* memory = nullptr;  // `user` or `bounce`
  int64_t at = 0;          // in the file
  int64_t used = 0;        // of the request
  int64_t bytes = 0;       // `used`, rounded up
  int64_t moved = 0;       // of `bytes`, so far
  int stalls = 0;
  uint32_t crc = 0;
  char* bounce = nullptr;  // block_bytes, or none yet

  SwapSlot() = default;
  SwapSlot(const SwapSlot&) = delete;
  SwapSlot& operator=(const SwapSlot&) = delete;
  ~SwapSlot() { free(bounce); }
};

class SwapRequests {
 public:
  // `options` outlive it.
  explicit SwapRequests(const SwapOptions& options) : options_(options) {}
  SwapRequests(const SwapRequests&) = delete;
  SwapRequests& operator=(const SwapRequests&) = delete;

  // Queues SwapFile's Read, ReadUrgent or Write. The caller wakes the thread
  // that talks to the disk, unless that waits in AwaitCut. ASYNC.
  enum class Kind { kRead, kReadUrgent, kWrite };
  SwapFuture Enqueue(Kind kind, const SwapExtent& extent, int64_t offset,
                     char* memory, int64_t bytes, absl::string_view what)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Takes the next block of the queue, if there is one. LOCAL.
  bool Cut(SwapSlot* slot) ABSL_LOCKS_EXCLUDED(mutex_);
  // As Cut, but waits for a block. False: there is none, and none will come
  // after Stop.
  bool AwaitCut(SwapSlot* slot) ABSL_LOCKS_EXCLUDED(mutex_);
  // Prepares a block for the disk; false: it has ended.
  bool Prepare(SwapSlot* slot);
  // Handles the disk's answer: bytes, or -errno. True: the rest of the block
  // must be requested.
  bool Landed(SwapSlot* slot, int64_t result);

  // Called when nothing is enqueued any more.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);
  bool stopping() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Forgets what was written there, which will not be read any more.
  void Forget(const SwapExtent& extent);
  // Returns the statistics, without file_bytes.
  SwapStats stats() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Request = SwapFuture::State;

  // Adds the time since the last call to the times of what is under way.
  void CountTime() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool CutLocked(SwapSlot* slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndBlock(SwapSlot* slot, absl::Status status)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Verify(const Request& request, int64_t begin, int64_t bytes,
                      bool across);
  absl::Status Error(const Request& request, int64_t at, absl::StatusCode code,
                     absl::string_view why, absl::string_view advice) const;
  absl::Status SystemError(const SwapSlot& slot, int error) const;

  const SwapOptions& options_;
  SwapChecksums checksums_;
  const std::shared_ptr<std::atomic<int64_t>> waited_ns_ =
      std::make_shared<std::atomic<int64_t>>(0);

  mutable absl::Mutex mutex_;
  // Urgent requests before others; each kind oldest first.
  std::deque<std::shared_ptr<Request>> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  int reads_ ABSL_GUARDED_BY(mutex_) = 0, writes_ ABSL_GUARDED_BY(mutex_) = 0;
  mutable absl::Duration counted_until_ ABSL_GUARDED_BY(mutex_);
  mutable SwapStats stats_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // OFFLOAD_DISK_SWAP_REQUESTS_H_
