// SwapFile: memory on a disk: one file of one rank, for what a run need not
// hold in memory all the time. Its content is worth nothing to anybody else,
// and nothing once the process has ended: the file loses its name when it is
// opened, so that the system frees it with the process, whatever ends that.
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
// Order: none between requests (those that wait for the disk go to it as they
// came, ReadUrgent's first). Who reads what is being written, or the other
// way round, waits in between.
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

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace tessera {

inline constexpr int64_t kSwapAlignment = 4096;  // bytes

struct SwapOptions {
  std::string folder;  // must exist; several jobs may have the same
  std::string owner;   // for messages: "rank 3"
  // Of one request to the disk (aio.block_size), a multiple of kSwapAlignment.
  int64_t block_bytes = 1 << 20;
  int queue_depth = 8;  // of these under way at a time (aio.queue_depth)
  int threads = 1;      // where there is no io_uring (aio.intra_op_parallelism)
  bool single_submit = false;  // blocks are submitted one by one
  bool overlap_events =
      true;  // completions are taken while others are submitted
  // Every block written has a checksum, which is looked at when it is read.
  bool checksums = false;
};

// A part of the file, both multiples of kSwapAlignment.
struct SwapExtent {
  int64_t begin = 0;
  int64_t bytes = 0;
};

// The end of one Read or Write. Copyable; a default-constructed one is done.
class SwapFuture {
 public:
  struct State;  // swap_requests.h

  SwapFuture() = default;
  explicit SwapFuture(std::shared_ptr<State> state)
      : state_(std::move(state)) {}
  // Blocks until the memory may be read, or used for something else. May be
  // called more than once, from any thread.
  absl::Status Wait() const;
  // Wait would not block.
  bool Done() const;

 private:
  std::shared_ptr<State> state_;
};

struct SwapStats {
  int64_t bytes_read = 0, bytes_written = 0;  // since Create
  // With at least one request of that kind under way.
  absl::Duration reading, writing;
  absl::Duration busy;     // with any
  absl::Duration waited;   // SwapFuture::Wait blocked for so long
  int64_t file_bytes = 0;  // allocated
};

class SwapSystem;  // the system calls: swap_system.h

class SwapFile {
 public:
  // Opens a new file in the folder, and takes its name away; removes what a job
  // has left there that was ended in between. `system`: null for the real one;
  // tests refuse calls with another, which outlives the file. Returns NotFound,
  // PermissionDenied, ... that name the folder. LOCAL.
  static absl::StatusOr<std::shared_ptr<SwapFile>> Create(
      const SwapOptions& options, SwapSystem* system = nullptr);
  // Waits for what is under way.
  virtual ~SwapFile() = default;

  // `bytes` are rounded up to kSwapAlignment. What lies there is anything.
  // ResourceExhausted says how much the file system has left. LOCAL.
  virtual absl::StatusOr<SwapExtent> Allocate(int64_t bytes) = 0;
  // Room that one can do without: of what the file system has left when this is
  // first called half stays free, for checkpoints, say. LOCAL.
  virtual absl::StatusOr<SwapExtent> AllocateSpare(int64_t bytes) = 0;
  // Room for another Allocate. REQUIRES: nothing of it is under way.
  virtual void Free(const SwapExtent& extent) = 0;

  // The memory is the file's until the future is done. `what` is for messages:
  // "optimizer states of unit layers.3". Of a write the bytes behind, up to a
  // multiple of kSwapAlignment, are anything afterwards. REQUIRES: within the
  // extent; `offset` is a multiple of kSwapAlignment. ASYNC.
  virtual SwapFuture Read(const SwapExtent& extent, int64_t offset, void* to,
                          int64_t bytes, absl::string_view what) = 0;
  // Before all that waits and is not urgent: somebody needs it to go on.
  virtual SwapFuture ReadUrgent(const SwapExtent& extent, int64_t offset,
                                void* to, int64_t bytes,
                                absl::string_view what) = 0;
  virtual SwapFuture Write(const SwapExtent& extent, int64_t offset,
                           const void* from, int64_t bytes,
                           absl::string_view what) = 0;

  // Memory that many requests will use, aligned to kSwapAlignment: the kernel
  // maps it once. A hint; false where it may not (RLIMIT_MEMLOCK). Until the
  // file's end or Unregister. REQUIRES of Unregister: nothing of it is under
  // way.
  virtual bool Register(void* memory, int64_t bytes) = 0;
  virtual void Unregister(void* memory) = 0;

  virtual SwapStats stats() const = 0;
  // "io_uring, O_DIRECT, registered buffers": for reports.
  virtual std::string Describe() const = 0;
};

}  // namespace tessera
#endif  // OFFLOAD_DISK_SWAP_FILE_H_
