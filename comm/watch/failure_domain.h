// FailureDomain: a group and the groups that were split off it, as seen by one
// rank.
//
//   ranks 0 1 2 3 -- Split --+-- ranks 0 1 -- Split -- ...
//                            '-- ranks 2 3
//
// They fail together: they share one place for announcements that concern all
// of them (comm/watch/announcements.h), one monitor for their waits, one of
// which is under way at a time (and one for what devices have been given), and
// one first failure. Ranks are those of the first group, in numbers and in
// messages. Lives as long as any of its groups.
//
// Threads: all calls may come from any thread.
#ifndef COMM_WATCH_FAILURE_DOMAIN_H_
#define COMM_WATCH_FAILURE_DOMAIN_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/group_options.h"
#include "comm/watch/announcements.h"
#include "comm/watch/first_failure.h"
#include "comm/watch/wait_monitor.h"

namespace tessera {

class FailureDomain {
 public:
  // Returns the domain of the group with these options, which begins one if it
  // has none. Requirements on `store` and errors are those of
  // Announcements::Create; also ResourceExhausted if there is no thread to
  // watch waits.
  static absl::StatusOr<std::shared_ptr<FailureDomain>> Join(
      const c10::intrusive_ptr<c10d::Store>& store, const GroupOptions& options,
      bool same_host);

  FailureDomain(const GroupOptions& options,
                std::unique_ptr<Announcements> announcements)
      : announcements_(std::move(announcements)),
        monitor_(announcements_.get(),
                 {options.collective_timeout, options.announce_grace}),
        collective_timeout_(options.collective_timeout),
        failure_(std::make_shared<FirstFailure>()) {}

  Announcements& announcements() { return *announcements_; }
  WaitMonitor& monitor() { return monitor_; }
  // For what all ranks have given to their devices. There is no other rank to
  // wait for: only the end of a process, or a failure that stays, ends it, or
  // the timeout. LOCAL.
  WaitMonitor& device_monitor();
  const std::shared_ptr<FirstFailure>& failure() const { return failure_; }

  // See Communicator::Announce; a final announcement is of a failure that
  // stays.
  void Announce(const absl::Status& status, bool final = false) {
    announcements_->Post(announcements_->FailedHere(status), final);
  }
  // Returns Unavailable if the process of `rank` has ended, or has left. LOCAL.
  absl::Status EndOf(int rank) const;
  // Returns what the first of `ranks` with an announcement has announced, or
  // that it has ended; OK if there is none. Asks the store. LOCAL.
  absl::Status TroubleOf(const std::vector<int>& ranks);

 private:
  const std::unique_ptr<Announcements> announcements_;
  WaitMonitor monitor_;
  const absl::Duration collective_timeout_;
  absl::Mutex mutex_;
  std::unique_ptr<WaitMonitor> device_monitor_ ABSL_GUARDED_BY(mutex_);
  const std::shared_ptr<FirstFailure> failure_;
};

}  // namespace tessera
#endif  // COMM_WATCH_FAILURE_DOMAIN_H_
