#include "checkpoint/save/save_notes.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/monotonic.h"

namespace tessera {
namespace {

constexpr absl::Duration kBusyEvery = absl::Seconds(1);

}  // namespace

SaveNotes::SaveNotes(NoteBoard* board, uint64_t id, int world_size)
    : board_(board),
      id_(absl::StrFormat("%016x", id)),
      heard_(static_cast<size_t>(world_size), {"", MonotonicNow()}) {}

bool SaveNotes::Tell(absl::string_view kind, absl::string_view text) {
  last_ = absl::StrCat(kind, " ", text);
  const std::string note = absl::StrCat(id_, " ", ++count_, " ", last_);
  last_busy_ = MonotonicNow();
  const absl::Duration until = MonotonicNow() + board_->patience();
  while (!board_->Write(note)) {
    if (!board_->EndOf(0).ok() || MonotonicNow() > until) return false;
    absl::SleepFor(absl::Milliseconds(10));
  }
  return true;
}

void SaveNotes::TellBusy() {
  const absl::Duration now = MonotonicNow();
  if (now - last_busy_ < kBusyEvery) return;
  last_busy_ = now;
  (void)board_->Write(absl::StrCat(id_, " ", ++count_, " ", last_));
}

std::vector<SaveNote> SaveNotes::Read(const std::vector<int>& ranks) {
  std::vector<SaveNote> notes(ranks.size());
  const auto all = board_->Read(ranks);
  for (size_t i = 0; i < notes.size(); ++i) {
    notes[i].silent = !all.has_value();
    if (notes[i].silent) continue;
    const std::vector<std::string> parts =
        absl::StrSplit((*all)[i], absl::MaxSplits(' ', 3));
    if (parts.size() != 4 || parts[0] != id_)
      continue;  // a note of an earlier save
    notes[i] = {parts[2], parts[3], parts[1]};
  }
  return notes;
}

void SaveNotes::ListenAnew() {
  for (Heard& heard : heard_) heard.since = MonotonicNow();
}

absl::Status SaveNotes::CheckAlive(int rank, const SaveNote& note) {
  const absl::Status ended = board_->EndOf(rank);
  if (!ended.ok()) return ended;
  Heard& heard = heard_[static_cast<size_t>(rank)];
  const absl::Duration now = MonotonicNow();
  std::string last =
      note.silent ? heard.last : absl::StrCat(note.kind, note.count);
  if (last != heard.last) heard = {std::move(last), now};
  if (now - heard.since <= board_->patience()) return absl::OkStatus();
  return absl::DeadlineExceededError(
      absl::StrCat("rank ", rank, " has not been heard of for ",
                   absl::FormatDuration(board_->patience()),
                   " while a checkpoint is saved: it is stopped, or its host "
                   "is cut off"));
}

}  // namespace tessera
