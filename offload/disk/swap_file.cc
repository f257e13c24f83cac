// The file is room only, without a layout: extents, as they were allocated.
// What is read and written goes through SwapRequests to a SwapRing, whose
// thread has all the slots; where there is none, threads have one slot each.
#include "offload/disk/swap_file.h"

#include <errno.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/check.h"
#include "base/status.h"
#include "base/thread/start_thread.h"
#include "offload/disk/swap_folder.h"
#include "offload/disk/swap_requests.h"
#include "offload/disk/swap_ring.h"
#include "offload/disk/swap_room.h"
#include "offload/disk/swap_system.h"

namespace tessera {
namespace {

constexpr int64_t kMostBlockBytes = int64_t{1} << 30;  // io_uring has 32 bits
constexpr int kMostDepth = 4096;

class RealSwapFile : public SwapFile {
 public:
  RealSwapFile(SwapOptions options, SwapSystem* system, OpenedSwap opened)
      : options_(std::move(options)),
        system_(system),
        fd_(opened.fd),
        direct_(opened.direct),
        requests_(options_) {}
  ~RealSwapFile() override;
  absl::Status Start();

  absl::StatusOr<SwapExtent> Allocate(int64_t bytes) override {
    return Allocate(bytes, /*left_free=*/0);
  }
  absl::StatusOr<SwapExtent> AllocateSpare(int64_t bytes) override;
  void Free(const SwapExtent& extent) override;
  SwapFuture Read(const SwapExtent& extent, int64_t offset, void* to,
                  int64_t bytes, absl::string_view what) override {
    return Enqueue(SwapRequests::Kind::kRead, extent, offset,
                   static_cast<char*>(to), bytes, what);
  }
  SwapFuture ReadUrgent(const SwapExtent& extent, int64_t offset, void* to,
                        int64_t bytes, absl::string_view what) override {
    return Enqueue(SwapRequests::Kind::kReadUrgent, extent, offset,
                   static_cast<char*>(to), bytes, what);
  }
  SwapFuture Write(const SwapExtent& extent, int64_t offset, const void* from,
                   int64_t bytes, absl::string_view what) override {
    auto* const memory = const_cast<char*>(static_cast<const char*>(from));
    return Enqueue(SwapRequests::Kind::kWrite, extent, offset, memory, bytes,
                   what);
  }
  bool Register(void* memory, int64_t bytes) override {
    return ring_ != nullptr && ring_->Register(memory, bytes);
  }
  void Unregister(void* memory) override {
    if (ring_ != nullptr) ring_->Unregister(memory);
  }
  SwapStats stats() const override;
  std::string Describe() const override;

 private:
  SwapFuture Enqueue(SwapRequests::Kind kind, const SwapExtent& extent,
                     int64_t offset, char* memory, int64_t bytes,
                     absl::string_view what);
  absl::StatusOr<SwapExtent> Allocate(int64_t bytes, int64_t left_free);
  absl::Status Full(int64_t bytes, int error);
  // Without a ring.
  void RunThread();

  const SwapOptions options_;
  SwapSystem* const system_;
  const int fd_;
  const bool direct_;

  absl::Mutex room_mutex_;
  SwapRoom room_ ABSL_GUARDED_BY(room_mutex_);
  int64_t spared_ ABSL_GUARDED_BY(room_mutex_) = -1;  // by AllocateSpare
  std::atomic<int64_t> file_bytes_{0};

  SwapRequests requests_;
  std::unique_ptr<SwapRing> ring_;  // null: threads; fixed after Start
  std::vector<std::thread> threads_;
};

RealSwapFile::~RealSwapFile() {
  requests_.Stop();
  if (ring_ != nullptr) ring_->Wake();
  for (std::thread& thread : threads_) thread.join();
  ring_.reset();
  system_->Close(fd_);
}

absl::Status RealSwapFile::Start() {
  if (system_->AllowsUring()) {
    ring_ = SwapRing::Create(options_, system_, fd_, &requests_);
  }
  const int threads = ring_ != nullptr ? 1 : options_.threads;
  for (int i = 0; i < threads; ++i) {
    auto thread = StartThread("tessera-swap", [this] {
      if (ring_ != nullptr) {
        ring_->Run();
      } else {
        RunThread();
      }
    });
    if (!thread.ok()) {
      return Annotate(thread.status(), absl::StrCat("[", options_.owner, "]"));
    }
    threads_.push_back(*std::move(thread));
  }
  return absl::OkStatus();
}

// Room.

absl::Status RealSwapFile::Full(int64_t bytes, int error) {
  const int64_t left = system_->FsFree(fd_);
  return absl::ResourceExhaustedError(absl::StrCat(
      "[", options_.owner, "] the swap file in ", options_.folder,
      " cannot have ", bytes, " bytes more: ", std::strerror(error),
      "; it has ", file_bytes_.load(), ", and its file system ",
      left < 0 ? "does not say how many it has left"
               : absl::StrCat("has ", left, " bytes left"),
      "; set nvme_path to a folder with more room, or keep more in memory with "
      "a lower ratio"));
}

// A file system that does not say how much it has is taken for a large one.
absl::StatusOr<SwapExtent> RealSwapFile::AllocateSpare(int64_t bytes) {
  int64_t spared;
  {
    absl::MutexLock lock(&room_mutex_);
    if (spared_ < 0) spared_ = std::max<int64_t>(0, system_->FsFree(fd_)) / 2;
    spared = spared_;
  }
  return Allocate(bytes, spared);
}

absl::StatusOr<SwapExtent> RealSwapFile::Allocate(int64_t bytes,
                                                  int64_t left_free) {
  TESSERA_CHECK(bytes >= 0) << bytes;
  if (bytes == 0) return SwapExtent{};
  SwapExtent extent;
  extent.bytes = SwapRoundUp(bytes);
  absl::MutexLock lock(&room_mutex_);
  if (room_.Take(extent.bytes, &extent.begin)) return extent;
  const int64_t end = room_.end();
  const int64_t more = extent.bytes - (end - room_.Tail());
  if (left_free > 0 && system_->FsFree(fd_) - more < left_free) {
    return Full(more, ENOSPC);
  }
  int result = 0;
  do {
    result = system_->Fallocate(fd_, end, more);
  } while (result == -EINTR);
  if (result == -EOPNOTSUPP || result == -ENOSYS) {
    result = system_->Truncate(fd_, end + more);
  }
  if (result < 0) {
    // What it may have taken before there was no more.
    (void)system_->Truncate(fd_, end);
    if (result == -ENOSPC || result == -EDQUOT || result == -EFBIG) {
      return Full(more, -result);
    }
    return absl::UnavailableError(absl::StrCat(
        "[", options_.owner, "] the swap file in ", options_.folder,
        " cannot have ", more, " bytes more: ", std::strerror(-result),
        "; set nvme_path to another folder"));
  }
  room_.Grow(more);
  file_bytes_ = room_.end();
  TESSERA_CHECK(room_.Take(extent.bytes, &extent.begin));
  return extent;
}

void RealSwapFile::Free(const SwapExtent& extent) {
  if (extent.bytes == 0) return;
  requests_.Forget(extent);
  absl::MutexLock lock(&room_mutex_);
  room_.Give(extent.begin, extent.bytes);
}

// Requests.

SwapFuture RealSwapFile::Enqueue(SwapRequests::Kind kind,
                                 const SwapExtent& extent, int64_t offset,
                                 char* memory, int64_t bytes,
                                 absl::string_view what) {
  SwapFuture future =
      requests_.Enqueue(kind, extent, offset, memory, bytes, what);
  if (ring_ != nullptr && bytes > 0) ring_->Wake();
  return future;
}

void RealSwapFile::RunThread() {
  SwapSlot slot;
  while (requests_.AwaitCut(&slot)) {
    if (!requests_.Prepare(&slot)) continue;
    const bool write = slot.request->write;
    int64_t result = 0;
    do {
      char* const memory = slot.memory + slot.moved;
      const int64_t bytes = slot.bytes - slot.moved;
      const int64_t at = slot.at + slot.moved;
      result = write ? system_->PWrite(fd_, memory, bytes, at)
                     : system_->PRead(fd_, memory, bytes, at);
    } while (requests_.Landed(&slot, result));
  }
}

SwapStats RealSwapFile::stats() const {
  SwapStats stats = requests_.stats();
  stats.file_bytes = file_bytes_;
  return stats;
}

std::string RealSwapFile::Describe() const {
  return absl::StrCat(
      ring_ != nullptr ? "io_uring"
                       : absl::StrCat("threads: ", options_.threads),
      direct_ ? ", O_DIRECT" : ", through the system's caches",
      ring_ != nullptr && ring_->HasRegistered() ? ", registered buffers" : "");
}

absl::Status Check(const SwapOptions& options) {
  if (options.block_bytes <= 0 || options.block_bytes % kSwapAlignment != 0 ||
      options.block_bytes > kMostBlockBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "[", options.owner, "] aio.block_size: expected a multiple of ",
        kSwapAlignment, " up to ", kMostBlockBytes, ", got ",
        options.block_bytes));
  }
  if (options.queue_depth < 1 || options.queue_depth > kMostDepth) {
    return absl::InvalidArgumentError(
        absl::StrCat("[", options.owner, "] aio.queue_depth: expected 1 to ",
                     kMostDepth, ", got ", options.queue_depth));
  }
  if (options.threads < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("[", options.owner,
                     "] aio.intra_op_parallelism: expected 1 or more, got ",
                     options.threads));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<SwapFile>> SwapFile::Create(
    const SwapOptions& options, SwapSystem* system) {
  TESSERA_RETURN_IF_ERROR(Check(options));
  if (system == nullptr) system = SwapSystem::Real();
  TESSERA_ASSIGN_OR_RETURN(const OpenedSwap opened,
                           OpenSwap(system, options.folder, options.owner));
  auto file = std::make_shared<RealSwapFile>(options, system, opened);
  TESSERA_RETURN_IF_ERROR(file->Start());
  return std::shared_ptr<SwapFile>(std::move(file));
}

}  // namespace tessera
