// FailureDomain: a group and the groups that were split off it, as one rank has
// them.
//
//   ranks 0 1 2 3 -- Split --+-- ranks 0 1 -- Split -- ...
//                            '-- ranks 2 3
//
// They fail together: their ranks have one board, on which each announces what
// concerns all of its groups, one monitor for their waits, one of which is
// under way at a time, and one first failure. Ranks are those of the first
// group, in numbers and in messages. Lives as long as any of its groups.
//
// Threads: all calls may come from any thread.
#ifndef COMM_WATCH_FAILURE_DOMAIN_H_
#define COMM_WATCH_FAILURE_DOMAIN_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/group_options.h"
#include "comm/watch/announcements.h"
#include "comm/watch/first_failure.h"
#include "comm/watch/wait_monitor.h"

namespace tessera {

class FailureDomain {
 public:
  // That of the group with these options, which begins one if it has none.
  // What must be in `store`, and errors: as of Announcements::Create.
  static absl::StatusOr<std::shared_ptr<FailureDomain>> Join(
      const c10::intrusive_ptr<c10d::Store>& store, const GroupOptions& options,
      bool same_host);

  FailureDomain(const GroupOptions& options,
                std::unique_ptr<Announcements> board)
      : board_(std::move(board)),
        monitor_(board_.get(),
                 {options.collective_timeout, options.announce_grace}),
        failure_(std::make_shared<FirstFailure>()) {}

  Announcements& board() { return *board_; }
  WaitMonitor& monitor() { return monitor_; }
  const std::shared_ptr<FirstFailure>& failure() const { return failure_; }

  // See Communicator::Announce; a final announcement is of a failure that
  // stays.
  void Announce(const absl::Status& status, bool final = false) {
    board_->Post(board_->FailedHere(status), final);
  }
  // Unavailable if the process of `rank` has ended, or has left. LOCAL.
  absl::Status EndOf(int rank) const;
  // Of the first of `ranks` that has announced something, its words, or that it
  // has ended; OK if there is none. Asks the store. LOCAL.
  absl::Status TroubleOf(const std::vector<int>& ranks);

 private:
  const std::unique_ptr<Announcements> board_;
  WaitMonitor monitor_;
  const std::shared_ptr<FirstFailure> failure_;
};

// Unavailable: that `rank` takes no part any more.
absl::Status HasEnded(int rank, bool left);

}  // namespace tessera
#endif  // COMM_WATCH_FAILURE_DOMAIN_H_
