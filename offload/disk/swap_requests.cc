#include "offload/disk/swap_requests.h"

#include <errno.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/monotonic.h"
#include "base/trace/trace.h"

namespace tessera {
namespace {

// A block that stays where it is, so often in a row, will not move any more.
constexpr int kMostStalls = 3;

}  // namespace

absl::Status SwapFuture::Wait() const {
  if (state_ == nullptr) return absl::OkStatus();
  absl::MutexLock lock(&state_->mutex);
  if (!state_->done) {
    const int64_t begin = TraceNow();
    state_->mutex.Await(absl::Condition(&state_->done));
    const int64_t end = TraceNow();
    *state_->waited_ns += end - begin;
    if (WaitsAreExposed()) {
      NoteExposedWait(WaitReason::kDisk, state_->what, begin, end);
    }
  }
  return state_->status;
}

bool SwapFuture::Done() const {
  if (state_ == nullptr) return true;
  absl::MutexLock lock(&state_->mutex);
  return state_->done;
}

SwapFuture SwapRequests::Enqueue(Kind kind, const SwapExtent& extent,
                                 int64_t offset, char* memory, int64_t bytes,
                                 absl::string_view what) {
  TESSERA_CHECK(offset >= 0 && bytes >= 0 && offset % kSwapAlignment == 0 &&
                offset + bytes <= extent.bytes)
      << what << ": " << bytes << " bytes at " << offset << " of "
      << extent.bytes;
  if (bytes == 0) return SwapFuture();
  auto request = std::make_shared<Request>();
  request->write = kind == Kind::kWrite;
  request->urgent = kind == Kind::kReadUrgent;
  request->memory = memory;
  request->begin = extent.begin + offset;
  request->bytes = bytes;
  request->what = std::string(what);
  request->waited_ns = waited_ns_;
  if (TraceRecords()) request->enqueued = TraceNow();
  {
    absl::MutexLock lock(&mutex_);
    CountTime();
    ++(request->write ? writes_ : reads_);
    const auto behind =
        request->urgent
            ? std::find_if(queue_.begin(), queue_.end(),
                           [](const auto& other) { return !other->urgent; })
            : queue_.end();
    queue_.insert(behind, request);
  }
  return SwapFuture(std::move(request));
}

bool SwapRequests::Cut(SwapSlot* slot) {
  absl::MutexLock lock(&mutex_);
  return CutLocked(slot);
}

bool SwapRequests::AwaitCut(SwapSlot* slot) {
  const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || !queue_.empty();
  };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&has_work));
  return CutLocked(slot);
}

bool SwapRequests::CutLocked(SwapSlot* slot) {
  if (queue_.empty()) return false;
  Request& request = *queue_.front();
  slot->request = queue_.front();
  slot->user = request.memory + request.cut;
  slot->at = request.begin + request.cut;
  slot->used = std::min(options_.block_bytes, request.bytes - request.cut);
  slot->bytes = SwapRoundUp(slot->used);
  slot->moved = 0;
  slot->stalls = 0;
  const bool as_it_is = SwapAligned(slot->user) && slot->used == slot->bytes;
  slot->memory = as_it_is ? slot->user : nullptr;
  request.cut += slot->used;
  ++request.under_way;
  if (request.cut == request.bytes) queue_.pop_front();
  return true;
}

bool SwapRequests::Prepare(SwapSlot* slot) {
  const bool write = slot->request->write;
  if (slot->memory == nullptr) {
    void* made = slot->bounce;
    if (made == nullptr &&
        posix_memalign(&made, kSwapAlignment,
                       static_cast<size_t>(options_.block_bytes)) != 0) {
      EndBlock(slot, SystemError(*slot, ENOMEM));
      return false;
    }
    slot->memory = slot->bounce = static_cast<char*>(made);
    if (write) {
      const auto used = static_cast<size_t>(slot->used);
      std::memcpy(slot->memory, slot->user, used);
      std::memset(slot->memory + used, 0,
                  static_cast<size_t>(slot->bytes) - used);
    }
  }
  if (write && options_.checksums) {
    checksums_.Forget(slot->at, slot->bytes);
    slot->crc = SwapChecksums::Of(slot->memory, slot->used);
  }
  return true;
}

bool SwapRequests::Landed(SwapSlot* slot, int64_t result) {
  if (result == -EINTR || result == -EAGAIN) return true;
  const bool write = slot->request->write;
  if (result < 0) {
    EndBlock(slot, SystemError(*slot, static_cast<int>(-result)));
    return false;
  }
  // With O_DIRECT the rest has to begin at a multiple, too.
  const int64_t before = slot->moved;
  slot->moved = std::min(SwapRoundDown(before + result), slot->bytes);
  slot->stalls = slot->moved == before ? slot->stalls + 1 : 0;
  if (slot->moved < slot->bytes) {
    if (result > 0 && slot->stalls < kMostStalls) return true;
    EndBlock(slot, write ? SystemError(*slot, EIO)
                         : Error(*slot->request, slot->at + before,
                                 absl::StatusCode::kDataLoss,
                                 "the file was truncated and ends there",
                                 "see who else writes to the disk"));
    return false;
  }
  absl::Status status;
  if (write) {
    if (options_.checksums) {
      checksums_.Put(slot->at, slot->used, slot->crc);
    }
  } else {
    if (slot->memory != slot->user) {
      std::memcpy(slot->user, slot->memory, static_cast<size_t>(slot->used));
    }
    status = Verify(*slot->request, slot->at, slot->used, false);
  }
  EndBlock(slot, status);
  return false;
}

void SwapRequests::Stop() {
  absl::MutexLock lock(&mutex_);
  stopping_ = true;
}

bool SwapRequests::stopping() const {
  absl::MutexLock lock(&mutex_);
  return stopping_;
}

void SwapRequests::Forget(const SwapExtent& extent) {
  if (options_.checksums) checksums_.Forget(extent.begin, extent.bytes);
}

SwapStats SwapRequests::stats() const {
  absl::MutexLock lock(&mutex_);
  CountTime();
  SwapStats stats = stats_;
  stats.waited = absl::Nanoseconds(waited_ns_->load());
  return stats;
}

void SwapRequests::CountTime() const {
  const absl::Duration now = MonotonicNow();
  const absl::Duration since = now - counted_until_;
  counted_until_ = now;
  if (reads_ > 0) stats_.reading += since;
  if (writes_ > 0) stats_.writing += since;
  if (reads_ + writes_ > 0) stats_.busy += since;
}

void SwapRequests::EndBlock(SwapSlot* slot, absl::Status status) {
  const std::shared_ptr<Request> request = std::move(slot->request);
  bool last = false;
  {
    absl::MutexLock lock(&mutex_);
    if (status.ok()) {
      (request->write ? stats_.bytes_written : stats_.bytes_read) += slot->used;
    } else if (request->error.ok()) {
      request->error = std::move(status);
      if (request->cut < request->bytes) {  // no more of it
        request->cut = request->bytes;
        queue_.erase(std::find(queue_.begin(), queue_.end(), request));
      }
    }
    last = --request->under_way == 0 && request->cut == request->bytes;
    status = request->error;
  }
  if (!last) return;
  if (!request->write && status.ok()) {
    status = Verify(*request, request->begin, request->bytes, true);
  }
  {
    absl::MutexLock lock(&mutex_);
    CountTime();
    --(request->write ? writes_ : reads_);
  }
  if (request->enqueued != 0) {
    AddTraceSpan(
        {request->write ? TraceTrack::kDiskWrite : TraceTrack::kDiskRead,
         request->what, request->enqueued, TraceNow(),
         std::string(UnitInText(request->what)), request->bytes});
  }
  absl::MutexLock lock(&request->mutex);
  request->status = std::move(status);
  request->done = true;
}

// What lies in one block of the request is looked at when that has come, so
// that others go on meanwhile; the rest, `across` its blocks, at its end.
absl::Status SwapRequests::Verify(const Request& request, int64_t begin,
                                  int64_t bytes, bool across) {
  if (!options_.checksums) return absl::OkStatus();
  const auto block_of = [&](int64_t at) {
    return (at - request.begin) / options_.block_bytes;
  };
  const int64_t wrong = checksums_.FirstWrong(
      begin, bytes, request.memory + (begin - request.begin),
      [&](int64_t from, int64_t to) {
        return across == (block_of(from) != block_of(to - 1));
      });
  if (wrong < 0) return absl::OkStatus();
  return Error(
      request, wrong, absl::StatusCode::kDataLoss,
      "the checksum is not that of what was written",
      "look for errors of the disk in the system's log (dmesg), or set "
      "nvme_path to a folder on another disk");
}

absl::Status SwapRequests::Error(const Request& request, int64_t at,
                                 absl::StatusCode code, absl::string_view why,
                                 absl::string_view advice) const {
  return absl::Status(
      code,
      absl::StrCat("[", options_.owner, "] ",
                   request.write ? "writing " : "reading ", request.bytes,
                   " bytes of ", request.what, request.write ? " to" : " from",
                   " the swap file in ", options_.folder, " failed at byte ",
                   at - request.begin, ": ", why, "; ", advice));
}

absl::Status SwapRequests::SystemError(const SwapSlot& slot, int error) const {
  const bool full = error == ENOSPC || error == EDQUOT || error == ENOMEM;
  return Error(*slot.request, slot.at + slot.moved,
               full ? absl::StatusCode::kResourceExhausted
                    : absl::StatusCode::kUnavailable,
               std::strerror(error),
               error == ENOMEM
                   ? "lower aio.block_size or aio.queue_depth"
                   : "look for errors of the disk in the system's log (dmesg), "
                     "or set nvme_path to a folder on another disk");
}

}  // namespace tessera
