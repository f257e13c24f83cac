#include "comm/wait_monitor.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "comm/sigpipe.h"

namespace tessera {
namespace {

// Since some fixed moment; unlike absl::Now() nobody can set it.
absl::Duration MonotonicNow() {
  return absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

// True for an error of this rank itself, not of a peer or the network.
bool IsLocal(const absl::Status& status) {
  return !absl::IsUnavailable(status) && !absl::IsCancelled(status) &&
         !absl::IsDeadlineExceeded(status);
}

}  // namespace

WaitMonitor::WaitMonitor(Announcements* board, Options options,
                         std::function<void()> abort)
    : board_(board),
      options_(options),
      // Often enough for short timeouts, rarely enough to cost nothing.
      tick_(std::min({absl::Seconds(1), options.timeout / 8,
                      std::max(options.grace / 4, absl::Milliseconds(20))})),
      abort_(std::move(abort)),
      thread_([this] { Watch(); }) {}

WaitMonitor::~WaitMonitor() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void WaitMonitor::Begin(WaitingIn wait) {
  // Who waits for this rank sees that it has come, see JudgeAnnouncements.
  if (board_->speaking()) board_->SetWaiting(wait);
  absl::MutexLock lock(&mutex_);
  active_ = true;
  ++id_;
  wait_ = std::move(wait);
  begin_ = MonotonicNow();
  verdict_ = absl::OkStatus();
}

absl::Status WaitMonitor::End(const absl::Status& outcome) {
  absl::Status reason;
  {
    absl::MutexLock lock(&mutex_);
    active_ = false;
    // With a verdict the transport is aborted, even if this wait won the race.
    reason = verdict_;
    if (reason.ok() && outcome.ok()) return outcome;
  }
  if (reason.ok() && !IsLocal(outcome)) {
    // A peer that failed announced it before its connection broke.
    std::vector<Announcement> said = board_->Read();
    if (!said.empty()) reason = said.front().status;
  }
  if (reason.ok()) reason = outcome;
  board_->Say(IsLocal(reason) ? board_->FailedHere(reason) : reason,
              /*final=*/true);
  return reason;
}

void WaitMonitor::Watch() {
  pthread_setname_np(pthread_self(), "tessera-watch");
  const SigpipeBlock no_sigpipe;
  absl::MutexLock lock(&mutex_);
  while (!mutex_.AwaitWithTimeout(absl::Condition(&stopping_), tick_)) {
    const absl::Duration waited = MonotonicNow() - begin_;
    if (!active_ || !verdict_.ok() || waited < tick_) continue;
    const WaitingIn wait = wait_;
    const int64_t id = id_;
    // The store may be slow; the collective must be able to end meanwhile.
    mutex_.Unlock();
    absl::Status verdict = Judge(wait, id, waited);
    mutex_.Lock();
    if (verdict.ok() || !active_ || id_ != id) continue;
    verdict_ = std::move(verdict);
    abort_();
  }
}

absl::Status WaitMonitor::Judge(const WaitingIn& wait, int64_t id,
                                absl::Duration waited) {
  if (waited >= options_.timeout) return TooLong(wait);
  if (published_ != id &&
      waited >= std::min(options_.grace, options_.timeout / 2)) {
    published_ = id;
    board_->SetWaiting(wait);
  }
  if (seen_in_ != id) {
    seen_in_ = id;
    seen_.clear();
  }
  absl::Status verdict = JudgeAnnouncements(wait);
  // A rank that announced something may be on its way to another collective
  // for that reason; its words say more.
  if (published_ == id && seen_.empty() && !board_->speaking()) {
    verdict.Update(JudgeMismatch(wait));
  }
  return verdict;
}

// Another rank's collective of the same number is not this one: neither ends.
absl::Status WaitMonitor::JudgeMismatch(const WaitingIn& wait) {
  const std::vector<std::optional<WaitingIn>> waiting = board_->ReadWaiting();
  for (size_t r = 0; r < waiting.size(); ++r) {
    const std::optional<WaitingIn>& at = waiting[r];
    if (!at.has_value() || at->sequence != wait.sequence ||
        at->signature == wait.signature) {
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "the ranks are in different collectives: this one in ", wait.what, " #",
        wait.sequence, ", rank ", r, " in ", at->what, " #", at->sequence,
        at->what == wait.what ? " with another size or dtype" : "",
        "; all ranks must run the same units in the same order"));
  }
  return absl::OkStatus();
}

absl::Status WaitMonitor::JudgeAnnouncements(const WaitingIn& wait) {
  const absl::Duration now = MonotonicNow();
  std::map<std::pair<int, int64_t>, absl::Duration> standing;
  for (const Announcement& said : board_->Read()) {
    const std::pair<int, int64_t> key(said.rank, said.count);
    const auto seen = seen_.find(key);
    const absl::Duration since = seen == seen_.end() ? now : seen->second;
    if (said.final ||
        (now - since >= options_.grace && !IsInSame(wait, said.rank))) {
      return said.status;
    }
    standing.emplace(key, since);
  }
  seen_ = std::move(standing);
  return absl::OkStatus();
}

bool WaitMonitor::IsInSame(const WaitingIn& wait, int rank) {
  const std::optional<WaitingIn> other = board_->ReadWaiting()[rank];
  return other.has_value() && other->sequence == wait.sequence &&
         other->signature == wait.signature;
}

absl::Status WaitMonitor::TooLong(const WaitingIn& wait) {
  std::vector<std::string> others;
  const std::vector<std::optional<WaitingIn>> waiting = board_->ReadWaiting();
  for (size_t r = 0; r < waiting.size(); ++r) {
    const std::optional<WaitingIn>& at = waiting[r];
    if (!at.has_value() || at->sequence < wait.sequence) continue;
    others.push_back(at->signature == wait.signature
                         ? absl::StrCat("rank ", r, " waits here too")
                         : absl::StrCat("rank ", r, " waits in ", at->what,
                                        " #", at->sequence));
  }
  if (others.empty()) others.push_back("no other rank is known to wait");
  return absl::DeadlineExceededError(
      absl::StrCat(wait.what, " #", wait.sequence, " has not ended within ",
                   absl::FormatDuration(options_.timeout), "; ",
                   absl::StrJoin(others, ", ")));
}

}  // namespace tessera
