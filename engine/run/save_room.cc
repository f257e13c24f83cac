#include "engine/run/save_room.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "checkpoint/disk/folder.h"
#include "checkpoint/together.h"

namespace tessera {
namespace {

constexpr char kManager[] = "CheckpointManager";
constexpr absl::Duration kFirstPause = absl::Milliseconds(250);
constexpr absl::Duration kLastPause = absl::Seconds(30);
constexpr int kOnlyLook = -1;

std::string TextOf(const DiskRoom& room, const std::string& dir) {
  std::string text = dir;
  if (room.needed_bytes > 0) {
    absl::StrAppend(&text, ": a checkpoint needs some ", room.needed_bytes,
                    " bytes");
  }
  if (room.free_bytes >= 0) {
    absl::StrAppend(&text, room.needed_bytes > 0 ? ", " : ": ", room.free_bytes,
                    " bytes are free");
  }
  if (!room.removed.empty()) {
    absl::StrAppend(&text, ", now that ", absl::StrJoin(room.removed, ", "),
                    " had to go");
  }
  return text;
}

}  // namespace

// Ranks may have heard different things of a save's end.
absl::StatusOr<std::string> SaveRoom::OfRank0(const std::string& mine) {
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      comm_->AllGatherStrings(comm_->rank() == 0 ? mine : "",
                              CommTag{"room for a checkpoint"}));
  return all[0];
}

// What the disks have then, of all hosts. Waits so long if nothing went.
absl::StatusOr<std::string> SaveRoom::Make(const std::string& good,
                                           const Retention& retention,
                                           int least, absl::Duration pause) {
  DiskRoom room;
  TESSERA_RETURN_IF_ERROR(RunTogether(comm_.get(), kManager, [&] {
    if (!options_.leads) return absl::OkStatus();
    room = MakeRoom(options_.dir, good, retention, least, FileSystem::Real(),
                    options_.holds);
    seemed_enough_ = room.free_bytes >= room.needed_bytes;
    if (room.removed.empty()) absl::SleepFor(pause);
    return absl::OkStatus();
  }));
  const std::string mine = options_.leads ? TextOf(room, options_.dir) : "";
  if (!room.removed.empty()) {
    TESSERA_LOG(WARNING) << mine
                         << ": while the disk holds no more, fewer than "
                         << "keep_last=" << retention.keep_last
                         << " checkpoints are kept";
  }
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      comm_->AllGatherStrings(mine, CommTag{"room for a checkpoint"}));
  std::vector<std::string> told;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty()) continue;
    told.push_back(options_.holds == FolderHolds::kPart
                       ? absl::StrCat("rank ", r, ": ", all[r])
                       : all[r]);
  }
  return absl::StrJoin(told, "; ");
}

absl::Status SaveRoom::Save(absl::Status before, const std::string& good,
                            const Retention& retention,
                            const std::function<absl::Status()>& save) {
  const absl::Duration end = MonotonicNow() + options_.retry_for;
  absl::Duration pause = kFirstPause;
  full_in_a_row_ = IsDiskFull(before) ? full_in_a_row_ + 1 : 0;
  absl::Status status = std::move(before);
  for (int refused = 0;; ++refused) {
    // A quota does not show in what is free, nor do some other ends of disks:
    // there was room enough, and yet the next save found none.
    const bool hidden = absl::StrContains(status.message(), "quota") ||
                        (refused + full_in_a_row_ > 1 && seemed_enough_);
    std::string mine;
    if (IsDiskFull(status)) mine = hidden ? "hidden" : "full";
    if (refused > 0 && !mine.empty() && MonotonicNow() >= end) mine = "end";
    TESSERA_ASSIGN_OR_RETURN(const std::string told, OfRank0(mine));
    if (refused > 0 && told.empty()) return status;
    tight_ |= !told.empty() && told != "end";
    if (tight_ || told == "end") {
      const bool wait = refused > 0 && told != "end";
      TESSERA_ASSIGN_OR_RETURN(const std::string room,
                               Make(good, retention,
                                    told == "hidden" ? 1
                                    : told == "end"  ? kOnlyLook
                                                     : 0,
                                    wait ? pause : absl::ZeroDuration()));
      if (told == "end") {
        return absl::Status(
            status.code(),
            absl::StrCat(status.message(), "; ", room, ". Tried for ",
                         absl::FormatDuration(options_.retry_for),
                         " (CheckpointManagerOptions::retry_for); the newest "
                         "whole checkpoint, and those of keep_every, stay"));
      }
      if (wait) {
        pause = std::min(pause * 2, kLastPause);
        TESSERA_LOG_RANK0(WARNING)
            << status.message() << "; " << room << ". Saving again";
      }
    }
    status = save();
    if (status.ok()) return status;
  }
}

bool SaveRoom::IsTimeAgain(const absl::Status& before) {
  if (!IsDiskFull(before) || options_.retry_for <= absl::ZeroDuration()) {
    full_since_.reset();
    return false;
  }
  const absl::Duration now = MonotonicNow();
  if (!full_since_.has_value()) {
    full_since_ = now;
    pause_ = kFirstPause;
    next_ = now;
  }
  if (now < next_ || now - *full_since_ > options_.retry_for) return false;
  pause_ = std::min(pause_ * 2, kLastPause);
  next_ = now + pause_;
  return true;
}

}  // namespace tessera
