#include "checkpoint/format/piece_reads.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera {
namespace {

constexpr unsigned kDepth = 8;
constexpr int64_t kReadBytes = 1 << 20;
// Bytes of a read that is only verified: they fit in a core's own cache when
// several threads verify.
constexpr int64_t kVerifyBytes = 512 << 10;

// Makes the kernel map the pages of these bytes at once. Otherwise it does so
// one by one while it copies, at several times the cost. They are still in the
// processor's caches then. It is a hint, which old kernels do not know.
void Populate(char* data, int64_t bytes) {
#ifdef MADV_POPULATE_WRITE
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin =
      (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end =
      (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) /
      kPage * kPage;
  if (begin >= end) return;
  (void)madvise(reinterpret_cast<void*>(begin), end - begin,
                MADV_POPULATE_WRITE);
#endif
}

}  // namespace

PieceReads::PieceReads(FileSystem* files) : ring_(files->MakeRing(kDepth)) {
  slots_.resize(ring_ == nullptr ? 1 : kDepth);
  for (size_t s = 0; s < slots_.size(); ++s) free_.push_back(s);
}

// Returns whether there is something to read.
absl::StatusOr<bool> PieceReads::Fill(const Source& next) {
  while (at_ == now_.end && !over_) {
    TESSERA_ASSIGN_OR_RETURN(std::optional<PieceRange> range, next());
    over_ = !range.has_value();
    if (over_) break;
    now_ = *std::move(range);
    at_ = now_.begin;
  }
  return at_ < now_.end;
}

// Reads what is in the system's caches at once, and verifies it while it is in
// the processor's.
absl::Status PieceReads::Run(const Source& next) {
  while (true) {
    if (!free_.empty()) {
      TESSERA_ASSIGN_OR_RETURN(const bool more, Fill(next));
      if (more) {
        const size_t s = free_.back();
        free_.pop_back();
        TESSERA_RETURN_IF_ERROR(Begin(s));
        if (ring_ == nullptr || !ring_->Ready()) continue;
      } else if (ring_ == nullptr || ring_->empty()) {
        return absl::OkStatus();
      }
    }
    const DiskRing::Done done = ring_->Next();
    TESSERA_RETURN_IF_ERROR(Finish(done.tag, done.result));
  }
}

absl::Status PieceReads::Begin(size_t s) {
  Slot& slot = slots_[s];
  slot.range = now_;
  slot.call =
      DataFileReader::CallAt(now_.piece_bytes, at_, now_.end,
                             now_.to == nullptr ? kVerifyBytes : kReadBytes);
  const int64_t bytes = slot.call.end - slot.call.begin;
  if (slot.call.whole && now_.to != nullptr) {
    slot.into = now_.to + (slot.call.begin - now_.begin);
    Populate(slot.into, bytes);
  } else {
    slot.buffer.resize(static_cast<size_t>(bytes));
    slot.into = slot.buffer.data();
  }
  at_ = std::min(slot.call.end, now_.end);
  if (ring_ == nullptr) return Finish(s, 0);
  const File& file = now_.file->file();
  ring_->Begin(s, {/*write=*/false, file.fd(), slot.into, bytes,
                   now_.piece->offset() + slot.call.begin});
  ring_->Submit();
  return absl::OkStatus();
}

// `done` is the number of bytes read, or an error, which occurs again when the
// rest is read in the ordinary way.
absl::Status PieceReads::Finish(size_t s, int64_t done) {
  Slot& slot = slots_[s];
  const PieceRange& range = slot.range;
  const int64_t bytes = slot.call.end - slot.call.begin;
  done = std::max(done, int64_t{0});
  if (done < bytes) {
    const int64_t from = range.piece->offset() + slot.call.begin;
    TESSERA_RETURN_IF_ERROR(Annotate(
        range.file->file().ReadAt(from + done, slot.into + done, bytes - done),
        absl::StrCat(range.what, ", bytes ", from, " to ", from + bytes)));
  }
  bytes_read_ += bytes;
  TESSERA_RETURN_IF_ERROR(
      range.file->Verify(*range.piece, slot.call, slot.into, range.what));
  if (!slot.call.whole && range.to != nullptr) {
    const int64_t begin = std::max(slot.call.begin, range.begin);
    const int64_t end = std::min(slot.call.end, range.end);
    std::copy(slot.into + (begin - slot.call.begin),
              slot.into + (end - slot.call.begin),
              range.to + (begin - range.begin));
  }
  slot.range = {};
  free_.push_back(s);
  return absl::OkStatus();
}

}  // namespace tessera
