#include "comm/watch/wait_monitor.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "comm/record/flight_recorder.h"
#include "comm/record/hang_dump.h"
#include "comm/watch/watchdog.h"

namespace tessera {
namespace {

// A wait is long, and looked at, from here on; then ever more rarely.
constexpr absl::Duration kFirstLook = absl::Milliseconds(100);
// What a dead rank had sent may still arrive.
constexpr absl::Duration kEndedGrace = absl::Milliseconds(300);
// A broken connection may be noticed before the liveness tells whose fault it
// is.
constexpr absl::Duration kNewsTime = absl::Milliseconds(200);

// The longest between two looks: many ranks ask the one store.
absl::Duration LongestInterval(int world_size) {
  return std::max(absl::Milliseconds(400), world_size * absl::Milliseconds(2));
}

absl::Duration BeatInterval(int world_size) {
  return std::max(absl::Seconds(1), world_size * absl::Milliseconds(10));
}

// Often enough for short timeouts, rarely enough to cost nothing.
absl::Duration Tick(absl::Duration timeout, absl::Duration grace) {
  return std::min(
      {kFirstLook, timeout / 8, std::max(grace / 4, absl::Milliseconds(20))});
}

absl::Status EndedStatus(const EndedRank& ended, const WaitingIn& wait) {
  return absl::UnavailableError(absl::StrCat(
      wait.what, " #", wait.sequence, ": rank ", ended.rank,
      ended.left ? " has ended (it left the job)"
                 : " has ended (its process is gone)",
      ", so this cannot complete; look at that rank's own last words"));
}

}  // namespace

WaitMonitor::WaitMonitor(Announcements* board, Options options)
    : board_(board),
      options_(options),
      tick_(Tick(options.timeout, options.grace)),
      progress_(board) {
  watch_ = Watchdog::Get().Add(tick_, [this] { Look(); });
}

WaitMonitor::~WaitMonitor() { Watchdog::Get().Remove(watch_); }

void WaitMonitor::Begin(WaitingIn wait,
                        std::shared_ptr<const WatchedGroup> group) {
  awaited_ = -1;
  const bool has_posted = board_->has_posted();
  WaitingIn said;
  {
    absl::MutexLock lock(&mutex_);
    wait.group = group->name;
    wait.begun = std::move(current_.wait.begun);
    wait.begun[wait.group] = wait.sequence;
    current_.active = true;
    current_.judged = false;
    ++current_.id;
    current_.wait = std::move(wait);
    current_.group = std::move(group);
    current_.begin = MonotonicNow();
    verdict_ = absl::OkStatus();
    if (has_posted) said = current_.wait;
  }
  // Who waits for this rank sees that it has come, see JudgeAnnouncements.
  if (has_posted) board_->SetWaiting(said);
}

void WaitMonitor::Forget(const std::string& group) {
  absl::MutexLock lock(&mutex_);
  current_.wait.begun.erase(group);
}

absl::Status WaitMonitor::End(const absl::Status& outcome) {
  absl::Status reason;
  WaitingIn wait;
  {
    absl::MutexLock lock(&mutex_);
    current_.active = false;
    current_.wait.finished = true;
    current_.group = nullptr;
    // With a verdict the transport is aborted, even if this wait won the race.
    reason = verdict_;
    if (reason.ok() && outcome.ok()) return outcome;
    wait = current_.wait;
  }
  if (!reason.ok()) {
    board_->Post(reason, /*final=*/true);
    return reason;
  }
  reason = outcome;
  if (!IsOwnError(outcome)) {
    // A peer that failed announced it before its connection broke. Of several
    // ranks that end one after the other the first is the cause.
    const bool ended = board_->liveness().WaitForEnd(kNewsTime);
    const std::vector<Announcement> said = board_->Read();
    if (!said.empty()) {
      reason = said.front().status;
    } else if (ended) {
      const EndedRank first = board_->liveness().Ended().front();
      const bool named = absl::StrContains(
          outcome.message(), absl::StrCat("rank ", first.rank, " has ended"));
      if (!named) reason = EndedStatus(first, wait);
    }
  }
  board_->PostFailure(reason);
  return reason;
}

void WaitMonitor::Look() {
  Current current;
  {
    absl::MutexLock lock(&mutex_);
    current = current_;
  }
  if (current.judged) return EndIfStuck(current);
  Publish(current);
  if (!current.active) return;
  absl::Status verdict = JudgeEnded(current);
  if (verdict.ok() && IsDue(current)) verdict = Judge(current);
  if (verdict.ok()) return;
  if (absl::IsDeadlineExceeded(verdict)) {
    verdict = WithHangDump(board_->rank(), verdict);
    dumped_ = true;
  }
  absl::MutexLock lock(&mutex_);
  if (!current_.active || current_.id != current.id) return;
  verdict_ = std::move(verdict);
  current_.judged = true;
  current_.judged_at = MonotonicNow();
  current_.group->abort();
}

void WaitMonitor::Publish(const Current& current) {
  const absl::Duration now = MonotonicNow();
  const bool long_wait = current.active && published_ != current.id &&
                         now - current.begin >= std::min(kFirstLook, tick_);
  if (current.id == 0 || (!long_wait && now < publish_at_)) return;
  published_ = current.id;
  board_->SetWaiting(current.wait);
  if (now < publish_at_) return;
  publish_at_ = now + BeatInterval(board_->world_size());
  const std::optional<AnnouncementSnapshot> board = board_->ReadSnapshot();
  if (!board.has_value()) return;
  progress_.Learn(*board);
  if (!current.active) DumpIfGivenUp(*board);
}

bool WaitMonitor::IsDue(const Current& current) {
  const absl::Duration now = MonotonicNow();
  if (seen_in_ != current.id) {
    seen_in_ = current.id;
    seen_.clear();
    interval_ = std::min(kFirstLook, tick_);
    look_at_ = current.begin + interval_;
  }
  if (now - current.begin >= options_.timeout) return true;
  if (now < look_at_) return false;
  // Doubling, but never so rarely that a short grace or timeout is missed.
  interval_ = std::min(2 * interval_, LongestInterval(board_->world_size()));
  look_at_ = now + std::min(interval_, std::max(tick_, options_.timeout / 8));
  return true;
}

absl::Status WaitMonitor::Judge(const Current& current) {
  const std::optional<AnnouncementSnapshot> board = board_->ReadSnapshot();
  if (board.has_value()) {
    progress_.Learn(*board);
    TESSERA_RETURN_IF_ERROR(JudgeAnnouncements(current, *board));
    // A rank that announced something may be on its way to another collective
    // for that reason; its words say more.
    if (board->said.empty() && !board_->has_posted()) {
      TESSERA_RETURN_IF_ERROR(JudgeMismatch(current.wait, *board));
    }
  }
  if (MonotonicNow() - current.begin < options_.timeout) {
    return absl::OkStatus();
  }
  return TooLong(current);
}

absl::Status WaitMonitor::JudgeEnded(const Current& current) const {
  for (const EndedRank& ended : board_->liveness().Ended()) {
    // One that left has done its part of all that it took part in.
    if (ended.left) continue;
    const absl::Duration since = std::max(ended.since, current.begin);
    if (MonotonicNow() - since < kEndedGrace) continue;
    // Its own words, if it left any, say more.
    const std::vector<Announcement> said = board_->Read();
    return said.empty() ? EndedStatus(ended, current.wait)
                        : said.front().status;
  }
  return absl::OkStatus();
}

// Another rank's collective of the same number is not this one: neither ends.
absl::Status WaitMonitor::JudgeMismatch(
    const WaitingIn& wait, const AnnouncementSnapshot& board) const {
  for (size_t r = 0; r < board.waiting.size(); ++r) {
    const std::optional<WaitingIn>& at = board.waiting[r];
    if (!at.has_value() || at->group != wait.group ||
        at->sequence != wait.sequence || at->signature == wait.signature) {
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "the ranks are in different collectives: rank ", board_->rank(), " in ",
        wait.Name(), ", rank ", r, " in ", at->Name(),
        "; all ranks must run the same units in the same order"));
  }
  return absl::OkStatus();
}

absl::Status WaitMonitor::JudgeAnnouncements(
    const Current& current, const AnnouncementSnapshot& board) {
  const absl::Duration now = MonotonicNow();
  const std::vector<int>& ranks = current.group->ranks;
  auto will_tell = [&](int rank) {
    const std::optional<WaitingIn>& at = board.waiting[rank];
    if (!at.has_value()) return false;
    // Those it waits for in another group may be those that this one waits for.
    if (!std::binary_search(ranks.begin(), ranks.end(), rank)) {
      return !at->finished;
    }
    return at->group == current.wait.group &&
           at->sequence == current.wait.sequence &&
           at->signature == current.wait.signature;
  };
  std::map<std::pair<int, int64_t>, absl::Duration> standing;
  for (const Announcement& said : board.said) {
    const std::pair<int, int64_t> key(said.rank, said.count);
    const auto seen = seen_.find(key);
    const absl::Duration since = seen == seen_.end() ? now : seen->second;
    if (said.final ||
        (now - since >= options_.grace && !will_tell(said.rank))) {
      return said.status;
    }
    standing.emplace(key, since);
  }
  seen_ = std::move(standing);
  return absl::OkStatus();
}

absl::Status WaitMonitor::TooLong(const Current& current) const {
  return absl::DeadlineExceededError(absl::StrCat(
      current.wait.Name(), " has not ended within ",
      absl::FormatDuration(options_.timeout), ": ",
      progress_.Describe(current.wait, current.group->ranks, awaited_,
                         MonotonicNow() - current.begin)));
}

void WaitMonitor::DumpIfGivenUp(const AnnouncementSnapshot& board) {
  for (const Announcement& said : board.said) {
    if (dumped_ || !said.final || !absl::IsDeadlineExceeded(said.status)) {
      continue;
    }
    dumped_ = true;
    TESSERA_LOG(WARNING) << WithHangDump(board_->rank(), said.status).message();
  }
}

void WaitMonitor::EndIfStuck(const Current& current) {
  if (!current.active ||
      MonotonicNow() - current.judged_at < options_.abort_grace) {
    return;
  }
  absl::Status verdict;
  {
    absl::MutexLock lock(&mutex_);
    verdict = verdict_;
  }
  board_->Post(verdict, /*final=*/true);
  TESSERA_LOG(ERROR) << verdict.message() << "; the wait cannot be ended ("
                     << absl::FormatDuration(options_.abort_grace)
                     << " have passed), so this process ends";
  _exit(1);
}

}  // namespace tessera
