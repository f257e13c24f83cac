// Why a thread beside the one that waits: that one is blocked in the transport,
// which cannot be asked to look at a store meanwhile, and which over shared
// memory never notices that a peer is gone. Why `abort`, and then the end of
// the process: a verdict is of no use to a rank that cannot return. A backend
// whose abort does not wake its wait would leave a process that neither trains
// nor ends, and its job's other ranks with it.
//
// Why the verdict is final for all ranks: after an aborted collective nobody
// knows which bytes arrived where. Whoever went on would compute with halves.
#include "comm/watch/wait_monitor.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "base/system/process_end.h"
#include "comm/record/hang_dump.h"
#include "comm/watch/watchdog.h"

namespace tessera {
namespace {

// A broken connection may be noticed before the liveness monitor tells whose
// fault it is.
constexpr absl::Duration kNewsTime = absl::Milliseconds(200);

absl::Duration BeatInterval(int world_size) {
  return std::max(absl::Seconds(1), world_size * absl::Milliseconds(10));
}

}  // namespace

WaitMonitor::WaitMonitor(Announcements* announcements, Options options)
    : announcements_(announcements),
      options_(options),
      judge_(announcements, {options.timeout, options.grace}) {
  if (!options_.on_watchdog) return;
  watch_ = Watchdog::Get().Add(judge_.tick(), [this] { Look(); });
}

WaitMonitor::~WaitMonitor() {
  if (options_.on_watchdog && watch_.ok()) Watchdog::Get().Remove(*watch_);
}

void WaitMonitor::Begin(WaitingIn wait,
                        std::shared_ptr<const WatchedGroup> group) {
  awaited_ = -1;
  const bool has_posted = options_.publishes && announcements_->has_posted();
  WaitingIn published;
  {
    absl::MutexLock lock(&mutex_);
    wait.group = group->name;
    if (options_.publishes) {
      wait.begun = std::move(current_.wait.begun);
      wait.begun[wait.group] = wait.sequence;
    }
    current_.active = true;
    current_.judged = false;
    ++current_.id;
    current_.wait = std::move(wait);
    current_.group = std::move(group);
    current_.begin = announcements_->Now();
    verdict_ = absl::OkStatus();
    if (has_posted) published = current_.wait;
  }
  // At once: who waits for this rank sees that it has come, and so that its
  // announcement need not end that wait (WaitJudge).
  if (has_posted) announcements_->SetWaiting(published);
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
    announcements_->Post(reason, /*final=*/true);
    return reason;
  }
  reason = outcome;
  if (!IsOwnError(outcome)) {
    // A peer that failed announced it before its connection broke. Of several
    // ranks that end one after the other the first is the cause.
    const bool ended = announcements_->liveness().WaitForEnd(kNewsTime);
    const std::vector<Announcement> posted = announcements_->Read();
    if (!posted.empty()) {
      reason = posted.front().status;
    } else if (ended) {
      const EndedRank first = announcements_->liveness().Ended().front();
      const bool named = absl::StrContains(
          outcome.message(), absl::StrCat("rank ", first.rank, " has ended"));
      if (!named) {
        reason = Annotate(HasEnded(first.rank, first.left), wait.Name());
      }
    }
  }
  announcements_->PostFailure(reason);
  return reason;
}

void WaitMonitor::Look() {
  Current current;
  {
    absl::MutexLock lock(&mutex_);
    current = current_;
  }
  if (current.judged) return EndIfStuck(current);
  if (options_.publishes) Publish(current);
  if (!current.active) return;
  absl::Status verdict = Judge(current);
  if (verdict.ok()) return;
  if (absl::IsDeadlineExceeded(verdict)) {
    verdict = WithHangDump(announcements_->rank(), verdict);
    dumped_ = true;
  }
  absl::MutexLock lock(&mutex_);
  if (!current_.active || current_.id != current.id) return;
  verdict_ = std::move(verdict);
  current_.judged = true;
  current_.judged_at = announcements_->Now();
  current_.group->abort();
}

void WaitMonitor::Publish(const Current& current) {
  const absl::Duration now = announcements_->Now();
  const bool long_wait = current.active && published_ != current.id &&
                         now - current.begin >= judge_.tick();
  if (current.id == 0 || (!long_wait && now < publish_at_)) return;
  published_ = current.id;
  announcements_->SetWaiting(current.wait);
  if (now < publish_at_) return;
  publish_at_ = now + BeatInterval(announcements_->world_size());
  const std::optional<AnnouncementSnapshot> snapshot =
      announcements_->ReadSnapshot();
  if (!snapshot.has_value()) return;
  judge_.progress().Learn(*snapshot);
  if (!current.active) DumpIfGivenUp(*snapshot);
}

absl::Status WaitMonitor::Judge(const Current& current) {
  const WaitJudge::Wait wait{current.wait.Name(), current.begin,
                             &current.group->ranks, &current.wait};
  TESSERA_RETURN_IF_ERROR(judge_.JudgeEnded(wait));
  TESSERA_RETURN_IF_ERROR(judge_.JudgeAnnouncements(wait));
  if (!judge_.TimedOut(wait.begin)) return absl::OkStatus();
  if (!options_.publishes) {
    return judge_.TooLong(wait.name,
                          "all ranks have given it to their devices, and that "
                          "of this one has not come to its end");
  }
  return judge_.TooLong(
      wait.name,
      judge_.progress().Describe(current.wait, current.group->ranks, awaited_,
                                 announcements_->Now() - current.begin));
}

void WaitMonitor::DumpIfGivenUp(const AnnouncementSnapshot& snapshot) {
  for (const Announcement& posted : snapshot.posted) {
    if (dumped_ || !posted.final || !absl::IsDeadlineExceeded(posted.status)) {
      continue;
    }
    dumped_ = true;
    TESSERA_LOG(WARNING)
        << WithHangDump(announcements_->rank(), posted.status).message();
  }
}

void WaitMonitor::EndIfStuck(const Current& current) {
  if (!current.active ||
      announcements_->Now() - current.judged_at < options_.abort_grace) {
    return;
  }
  absl::Status verdict;
  {
    absl::MutexLock lock(&mutex_);
    verdict = verdict_;
  }
  announcements_->Post(verdict, /*final=*/true);
  TESSERA_LOG(ERROR) << verdict.message() << "; the wait cannot be ended ("
                     << absl::FormatDuration(options_.abort_grace)
                     << " have passed), so this process ends";
  EndProcess(ProcessEnd::kStuck, 1);
}

}  // namespace tessera
