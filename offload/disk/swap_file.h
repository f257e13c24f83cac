// SwapFile: memory on a disk: one file of one rank, for what a run need not
// hold in memory all the time. Its content is useless to others, and after the
// end of the process: the file is unlinked when it is opened, so that the
// system frees it with the process, however that ends.
//
//   Allocate(bytes) --> SwapExtent     room that the disk has promised (ENOSPC
//                                      comes here, and not in the middle)
//   Write(extent, offset, from, n) --> SwapFuture, ASYNC
//   Read(extent, offset, to, n)    --> SwapFuture, ASYNC
//
// Requests are cut into blocks, of which some are under way at a time: by
// io_uring with O_DIRECT, so that the system's caches hold no second copy; by
// threads where the kernel has no io_uring or forbids it; without O_DIRECT
// where the file system knows none. Memory, offset and length that are
// multiples of kSwapAlignment are handed to the disk as they are; others go
// through blocks of the file's own, a copy more.
//
// Order: requests are not ordered (waiting ones go to the disk in the order in
// which they came, ReadUrgent's first). To read what is being written, or the
// other way round, wait in between.
//
// Errors name folder, owner, what was read or written, and what to try:
// ResourceExhausted (no room: Allocate), DataLoss (a short read, a checksum),
// Unavailable (the system's own: EIO, ...). A request that fails changes
// nothing for others.
//
// Sources: ZeRO-Infinity (arXiv 2104.07857); DeepSpeed's aio.*. No torch.
// Threads: any.
#ifndef OFFLOAD_DISK_SWAP_FILE_H_
#define OFFLOAD_DISK_SWAP_FILE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "offload/disk/swap_room.h"

namespace tessera {

inline constexpr int64_t kSwapAlignment = 4096;  // bytes

struct SwapOptions {
  std::string folder;  // must exist; several jobs may have the same
  std::string owner;   // for messages: "rank 3"
  // Bytes of one request to the disk (aio.block_size), a multiple of
  // kSwapAlignment.
  int64_t block_bytes = 1 << 20;
  int queue_depth = 8;  // of these under way at a time (aio.queue_depth)
  int threads = 1;      // where there is no io_uring (aio.intra_op_parallelism)
  bool single_submit = false;  // blocks are submitted one by one
  bool overlap_events =
      true;  // completions are taken while others are submitted
  // Every block written has a checksum, which is checked when it is read.
  bool checksums = false;
};

// A part of the file, both multiples of kSwapAlignment.
struct SwapExtent {
  int64_t begin = 0;
  int64_t bytes = 0;
};

// A future for the end of one Read or Write. Copyable; a default-constructed
// one is done.
class SwapFuture {
 public:
  struct State;  // swap_requests.h

  SwapFuture() = default;
  explicit SwapFuture(std::shared_ptr<State> state)
      : state_(std::move(state)) {}
  // Blocks until the memory may be read, or used for something else. May be
  // called more than once, from any thread.
  absl::Status Wait() const;
  // Whether Wait would return at once.
  bool Done() const;

 private:
  std::shared_ptr<State> state_;
};

struct SwapStats {
  int64_t bytes_read = 0, bytes_written = 0;  // since Create
  // Time with at least one request of that kind under way.
  absl::Duration reading, writing;
  absl::Duration busy;     // with any
  absl::Duration waited;   // SwapFuture::Wait blocked for so long
  int64_t file_bytes = 0;  // allocated
};

class DiskRing;      // base/disk/disk_ring.h
class FileSystem;    // base/disk/file_system.h
class SwapRequests;  // offload/disk/swap_requests.h
struct SwapSlot;

class SwapFile {
 public:
  // Opens a new file in the folder and unlinks it; removes files of jobs that
  // were killed in between. `files`: null for the real ones; tests refuse calls
  // with others, which outlive the file. Errors (NotFound, PermissionDenied,
  // ...) name the folder. LOCAL.
  static absl::StatusOr<std::shared_ptr<SwapFile>> Create(
      const SwapOptions& options, FileSystem* files = nullptr);
  // Waits for what is under way.
  ~SwapFile();
  SwapFile(const SwapFile&) = delete;
  SwapFile& operator=(const SwapFile&) = delete;

  // Allocates room; `bytes` are rounded up to kSwapAlignment. Its content is
  // unspecified. ResourceExhausted says how much the file system has left.
  // LOCAL.
  absl::StatusOr<SwapExtent> Allocate(int64_t bytes) {
    return Allocate(bytes, /*left_free=*/0);
  }
  // Allocates optional room: half of what the file system has left at the first
  // call stays free, for example for checkpoints. LOCAL.
  absl::StatusOr<SwapExtent> AllocateSpare(int64_t bytes);
  // Frees room for another Allocate. REQUIRES: no request on it is under way.
  void Free(const SwapExtent& extent);

  // Start a read or a write; the memory belongs to the file until the future is
  // done. `what` is for messages: "optimizer states of unit layers.3". A write
  // leaves the bytes after its end, up to a multiple of kSwapAlignment,
  // unspecified. REQUIRES: within the extent; `offset` is a multiple of
  // kSwapAlignment. ASYNC.
  SwapFuture Read(const SwapExtent& extent, int64_t offset, void* to,
                  int64_t bytes, absl::string_view what);
  // Starts a read before all waiting requests that are not urgent.
  SwapFuture ReadUrgent(const SwapExtent& extent, int64_t offset, void* to,
                        int64_t bytes, absl::string_view what);
  SwapFuture Write(const SwapExtent& extent, int64_t offset, const void* from,
                   int64_t bytes, absl::string_view what);

  // Registers memory that many requests will use, aligned to kSwapAlignment, so
  // that the kernel maps it once, until the file's end or Unregister. A hint;
  // false where that is not allowed (RLIMIT_MEMLOCK). REQUIRES of Unregister:
  // no request on it is under way.
  bool Register(void* memory, int64_t bytes);
  void Unregister(void* memory);

  SwapStats stats() const;
  // Describes the file for reports: "io_uring, O_DIRECT, registered buffers".
  std::string Describe() const;

 private:
  SwapFile(SwapOptions options, FileSystem* files, int fd, bool direct);
  absl::Status Start();
  absl::StatusOr<SwapExtent> Allocate(int64_t bytes, int64_t left_free);
  absl::Status Full(int64_t bytes, int error);
  void RunRing();
  SwapFuture Woken(SwapFuture future);
  void BeginOnRing(const SwapSlot& slot, size_t tag);
  void RunThread();

  const SwapOptions options_;
  FileSystem* const files_;
  const int fd_;
  const bool direct_;

  absl::Mutex room_mutex_;
  SwapRoom room_ ABSL_GUARDED_BY(room_mutex_);
  int64_t spared_ ABSL_GUARDED_BY(room_mutex_) = -1;  // by AllocateSpare
  std::atomic<int64_t> file_bytes_{0};

  std::unique_ptr<SwapRequests> requests_;
  std::unique_ptr<DiskRing> ring_;  // null: threads; fixed after Start
  std::vector<std::thread> threads_;
};

}  // namespace tessera
#endif  // OFFLOAD_DISK_SWAP_FILE_H_
