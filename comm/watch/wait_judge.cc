// Why graces at all: the cause of a failure and its consequences come by
// different ways. A rank that fails announces it, its connections break, its
// process ends, and the agreement in which it tells the others may be under way
// meanwhile. Who judged by the first sign would name a consequence ("connection
// reset", or a rank that ended because another had failed), or end a wait that
// was about to end as it should. So the process of a rank counts as gone only
// when what it had sent has had time to arrive, and an announcement counts only
// when its rank is not on its way to tell it in an orderly way.
//
// Why looks become rare: all ranks ask one store. A thousand ranks that each
// ask every 100 ms in a wait of minutes would keep it from answering anybody.
#include "comm/watch/wait_judge.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "comm/mismatch_hint.h"

namespace tessera {
namespace {

// A wait is long, and looked at, from here on.
constexpr absl::Duration kFirstLook = absl::Milliseconds(100);
// What a dead rank had sent may still arrive; and why it closed its end may
// come later than that.
constexpr absl::Duration kEndedGrace = absl::Milliseconds(300);

// The longest between two looks.
absl::Duration LongestInterval(int world_size) {
  return std::max(absl::Milliseconds(400), world_size * absl::Milliseconds(2));
}

// Often enough for short timeouts, rarely enough to cost nothing.
absl::Duration Tick(const WaitJudge::Options& options) {
  return std::min({kFirstLook, options.timeout / 8,
                   std::max(options.grace / 4, absl::Milliseconds(20))});
}

// Will the rank that is at `at` tell in an orderly way what it has announced?
bool WillTell(int rank, const std::optional<WaitingIn>& at,
              const WaitJudge::Wait& wait) {
  if (!at.has_value()) return false;
  // Those it waits for in another group may be those that this one waits for.
  if (!std::binary_search(wait.ranks->begin(), wait.ranks->end(), rank)) {
    return !at->finished;
  }
  return wait.collective != nullptr && at->group == wait.collective->group &&
         at->sequence == wait.collective->sequence &&
         at->signature == wait.collective->signature;
}

}  // namespace

WaitJudge::WaitJudge(Announcements* announcements, Options options)
    : announcements_(announcements),
      options_(options),
      tick_(Tick(options)),
      progress_(announcements) {}

bool WaitJudge::TimedOut(absl::Duration begin) const {
  return announcements_->Now() - begin >= options_.timeout;
}

absl::Status WaitJudge::TooLong(absl::string_view name,
                                absl::string_view whom) const {
  return absl::DeadlineExceededError(
      absl::StrCat(name, " has not ended within ",
                   absl::FormatDuration(options_.timeout), ": ", whom));
}

bool WaitJudge::EndedGraceIsOver(absl::Duration since,
                                 absl::Duration begin) const {
  return announcements_->Now() - std::max(since, begin) >= kEndedGrace;
}

absl::Status WaitJudge::PostedOr(const absl::Status& otherwise) const {
  const std::vector<Announcement> posted = announcements_->Read();
  return posted.empty() ? otherwise : posted.front().status;
}

absl::Status WaitJudge::JudgeEnded(const Wait& wait) const {
  for (const EndedRank& ended : announcements_->liveness().Ended()) {
    // One that left has done its part of all that it took part in.
    if (ended.left || !EndedGraceIsOver(ended.since, wait.begin)) continue;
    return PostedOr(Annotate(HasEnded(ended.rank, ended.left), wait.name));
  }
  return absl::OkStatus();
}

bool WaitJudge::IsDue(const Wait& wait) {
  const absl::Duration now = announcements_->Now();
  if (judged_begin_ != wait.begin) {
    judged_begin_ = wait.begin;
    // One that began before the last look, as the pull behind the oldest did,
    // was seen by it: a look for each such would be one in every tick.
    if (wait.begin >= looked_at_) {
      interval_ = tick_;
      look_at_ = wait.begin + interval_;
    }
  }
  // What is told of a wait that lasted too long is to be new.
  if (TimedOut(wait.begin)) return true;
  if (now < look_at_) return false;
  looked_at_ = now;
  // Doubling, but never so rarely that a short timeout is missed.
  interval_ =
      std::min(2 * interval_, LongestInterval(announcements_->world_size()));
  look_at_ = now + std::min(interval_, std::max(tick_, options_.timeout / 8));
  return true;
}

absl::Status WaitJudge::JudgeAnnouncements(const Wait& wait) {
  if (!IsDue(wait)) return absl::OkStatus();
  const std::optional<AnnouncementSnapshot> snapshot =
      announcements_->ReadSnapshot();
  if (!snapshot.has_value()) return absl::OkStatus();
  progress_.Learn(*snapshot);
  TESSERA_RETURN_IF_ERROR(JudgePosted(wait, *snapshot));
  // A rank that announced something may be on its way to another collective
  // for that reason, which tells more than the difference.
  if (wait.collective == nullptr || !snapshot->posted.empty() ||
      announcements_->has_posted()) {
    return absl::OkStatus();
  }
  return JudgeMismatch(*wait.collective, *snapshot);
}

absl::Status WaitJudge::JudgePosted(const Wait& wait,
                                    const AnnouncementSnapshot& snapshot) {
  const absl::Duration now = announcements_->Now();
  std::map<std::pair<int, int64_t>, absl::Duration> standing;
  for (const Announcement& posted : snapshot.posted) {
    const std::pair<int, int64_t> key(posted.rank, posted.count);
    const auto seen = first_seen_.find(key);
    const absl::Duration first = seen == first_seen_.end() ? now : seen->second;
    standing.emplace(key, first);
    const absl::Duration stood = now - std::max(first, wait.begin);
    if (posted.final ||
        (stood >= options_.grace &&
         !WillTell(posted.rank, snapshot.waiting[posted.rank], wait))) {
      return posted.status;
    }
  }
  first_seen_ = std::move(standing);
  return absl::OkStatus();
}

// Another rank's collective of the same number is not this one: neither ends.
absl::Status WaitJudge::JudgeMismatch(
    const WaitingIn& collective, const AnnouncementSnapshot& snapshot) const {
  for (size_t r = 0; r < snapshot.waiting.size(); ++r) {
    const std::optional<WaitingIn>& at = snapshot.waiting[r];
    if (!at.has_value() || at->group != collective.group ||
        at->sequence != collective.sequence ||
        at->signature == collective.signature) {
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "the ranks are in different collectives: rank ", announcements_->rank(),
        " in ", collective.Name(), ", rank ", r, " in ", at->Name(),
        MismatchHint(collective.Name(), at->Name())));
  }
  return absl::OkStatus();
}

absl::Status HasEnded(int rank, bool left) {
  return absl::UnavailableError(
      absl::StrCat("rank ", rank, " has ended (",
                   left ? "it has left this group" : "its process is gone",
                   "); look at that rank's own last lines"));
}

}  // namespace tessera
