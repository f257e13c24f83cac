// The file is room only, without a layout: extents, as they were allocated.
// What is read and written goes through SwapRequests to a DiskRing, whose
// thread has all the slots, queue_depth of them; where there is no ring,
// threads have one slot each.
#include "offload/disk/swap_file.h"

#include <errno.h>

#include <algorithm>
#include <cstring>
#include <deque>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/disk/disk_ring.h"
#include "base/disk/file_system.h"
#include "base/status.h"
#include "base/thread/start_thread.h"
#include "offload/disk/swap_folder.h"
#include "offload/disk/swap_requests.h"

namespace tessera {
namespace {

constexpr int64_t kMostBlockBytes = int64_t{1} << 30;  // io_uring has 32 bits
constexpr int kMostDepth = 4096;

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

SwapFile::SwapFile(SwapOptions options, FileSystem* files, int fd, bool direct)
    : options_(std::move(options)),
      files_(files),
      fd_(fd),
      direct_(direct),
      requests_(std::make_unique<SwapRequests>(options_)) {}

absl::StatusOr<std::shared_ptr<SwapFile>> SwapFile::Create(
    const SwapOptions& options, FileSystem* files) {
  TESSERA_RETURN_IF_ERROR(Check(options));
  if (files == nullptr) files = FileSystem::Private();
  TESSERA_ASSIGN_OR_RETURN(const OpenedSwap opened,
                           OpenSwap(files, options.folder, options.owner));
  std::shared_ptr<SwapFile> file(
      new SwapFile(options, files, opened.fd, opened.direct));
  TESSERA_RETURN_IF_ERROR(file->Start());
  return file;
}

SwapFile::~SwapFile() {
  requests_->Stop();
  if (ring_ != nullptr) ring_->Wake();
  for (std::thread& thread : threads_) thread.join();
  ring_.reset();
  files_->Close(fd_);
}

absl::Status SwapFile::Start() {
  ring_ = files_->MakeRing(static_cast<unsigned>(options_.queue_depth));
  const int threads = ring_ != nullptr ? 1 : options_.threads;
  for (int i = 0; i < threads; ++i) {
    auto thread = StartThread(
        "tessera-swap", [this] { ring_ != nullptr ? RunRing() : RunThread(); });
    if (!thread.ok()) {
      return Annotate(thread.status(), absl::StrCat("[", options_.owner, "]"));
    }
    threads_.push_back(*std::move(thread));
  }
  return absl::OkStatus();
}

// Room.

absl::Status SwapFile::Full(int64_t bytes, int error) {
  const int64_t left = files_->FreeBytes(fd_);
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
absl::StatusOr<SwapExtent> SwapFile::AllocateSpare(int64_t bytes) {
  int64_t spared;
  {
    absl::MutexLock lock(&room_mutex_);
    if (spared_ < 0) spared_ = std::max<int64_t>(0, files_->FreeBytes(fd_)) / 2;
    spared = spared_;
  }
  return Allocate(bytes, spared);
}

absl::StatusOr<SwapExtent> SwapFile::Allocate(int64_t bytes,
                                              int64_t left_free) {
  TESSERA_CHECK(bytes >= 0) << bytes;
  if (bytes == 0) return SwapExtent{};
  SwapExtent extent;
  extent.bytes = SwapRoundUp(bytes);
  absl::MutexLock lock(&room_mutex_);
  if (room_.Take(extent.bytes, &extent.begin)) return extent;
  const int64_t end = room_.end();
  const int64_t more = extent.bytes - (end - room_.Tail());
  if (left_free > 0 && files_->FreeBytes(fd_) - more < left_free) {
    return Full(more, ENOSPC);
  }
  int result = Uninterrupted([&] { return files_->Allocate(fd_, end, more); });
  if (result == -EOPNOTSUPP || result == -ENOSYS) {
    result = files_->Truncate(fd_, end + more);
  }
  if (result < 0) {
    // What it may have taken before there was no more.
    (void)files_->Truncate(fd_, end);
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

void SwapFile::Free(const SwapExtent& extent) {
  if (extent.bytes == 0) return;
  requests_->Forget(extent);
  absl::MutexLock lock(&room_mutex_);
  room_.Give(extent.begin, extent.bytes);
}

// Requests.

SwapFuture SwapFile::Read(const SwapExtent& extent, int64_t offset, void* to,
                          int64_t bytes, absl::string_view what) {
  return Woken(requests_->Enqueue(SwapRequests::Kind::kRead, extent, offset,
                                  static_cast<char*>(to), bytes, what));
}

SwapFuture SwapFile::ReadUrgent(const SwapExtent& extent, int64_t offset,
                                void* to, int64_t bytes,
                                absl::string_view what) {
  return Woken(requests_->Enqueue(SwapRequests::Kind::kReadUrgent, extent,
                                  offset, static_cast<char*>(to), bytes, what));
}

SwapFuture SwapFile::Write(const SwapExtent& extent, int64_t offset,
                           const void* from, int64_t bytes,
                           absl::string_view what) {
  auto* const memory = const_cast<char*>(static_cast<const char*>(from));
  return Woken(requests_->Enqueue(SwapRequests::Kind::kWrite, extent, offset,
                                  memory, bytes, what));
}

// Wakes the ring's thread for what was enqueued; others wait in AwaitCut.
SwapFuture SwapFile::Woken(SwapFuture future) {
  if (ring_ != nullptr) ring_->Wake();
  return future;
}

bool SwapFile::Register(void* memory, int64_t bytes) {
  return ring_ != nullptr && SwapAligned(memory) &&
         ring_->Register(static_cast<char*>(memory), bytes);
}

void SwapFile::Unregister(void* memory) {
  if (ring_ != nullptr) ring_->Unregister(static_cast<char*>(memory));
}

// The first completion is waited for, and with it come those that are there.
void SwapFile::RunRing() {
  std::deque<SwapSlot> slots;
  std::vector<size_t> idle;
  for (int i = 0; i < options_.queue_depth; ++i) {
    idle.push_back(slots.size());
    slots.emplace_back();
  }
  bool listening = false;
  while (true) {
    const bool stopping = requests_->stopping();
    const bool fills = options_.overlap_events || idle.size() == slots.size();
    while (fills && !idle.empty() && requests_->Cut(&slots[idle.back()])) {
      if (!requests_->Prepare(&slots[idle.back()])) continue;
      BeginOnRing(slots[idle.back()], idle.back());
      idle.pop_back();
    }
    if (stopping && idle.size() == slots.size() && !listening) return;
    if (!stopping && !listening) ring_->Listen();
    listening = listening || !stopping;
    do {
      const DiskRing::Done done = ring_->Next();
      if (done.tag == DiskRing::kWoken) {
        listening = false;
        continue;
      }
      SwapSlot* const slot = &slots[done.tag];
      if (requests_->Landed(
              slot, files_->Completed(slot->request->write,
                                      slot->at + slot->moved, done.result))) {
        BeginOnRing(*slot, done.tag);
      } else {
        idle.push_back(done.tag);
      }
    } while (ring_->Ready());
  }
}

// Begins what is left of a block.
void SwapFile::BeginOnRing(const SwapSlot& slot, size_t tag) {
  ring_->Begin(tag, {slot.request->write, fd_, slot.memory + slot.moved,
                     slot.bytes - slot.moved, slot.at + slot.moved,
                     ring_->BufferOf(slot.memory, slot.bytes)});
  if (options_.single_submit) ring_->Submit();
}

void SwapFile::RunThread() {
  SwapSlot slot;
  while (requests_->AwaitCut(&slot)) {
    if (!requests_->Prepare(&slot)) continue;
    const bool write = slot.request->write;
    int64_t result = 0;
    do {
      char* const memory = slot.memory + slot.moved;
      const int64_t bytes = slot.bytes - slot.moved;
      const int64_t at = slot.at + slot.moved;
      result = write ? files_->Write(fd_, memory, bytes, at)
                     : files_->Read(fd_, memory, bytes, at);
    } while (requests_->Landed(&slot, result));
  }
}

SwapStats SwapFile::stats() const {
  SwapStats stats = requests_->stats();
  stats.file_bytes = file_bytes_;
  return stats;
}

std::string SwapFile::Describe() const {
  return absl::StrCat(
      ring_ != nullptr ? "io_uring"
                       : absl::StrCat("threads: ", options_.threads),
      direct_ ? ", O_DIRECT" : ", through the system's caches",
      ring_ != nullptr && ring_->HasRegistered() ? ", registered buffers" : "");
}

}  // namespace tessera
