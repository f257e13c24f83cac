// WatchedCommunicator: what the backends of several ranks share. Each of their
// collectives runs under a monitor (comm/wait_monitor.h), and the ranks tell
// each other of failures (comm/announcements.h).
#ifndef COMM_WATCHED_COMMUNICATOR_H_
#define COMM_WATCHED_COMMUNICATOR_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "comm/announcements.h"
#include "comm/group_options.h"
#include "comm/queued_communicator.h"
#include "comm/wait_monitor.h"

namespace tessera {

class WatchedCommunicator : public QueuedCommunicator {
 public:
  void Announce(const absl::Status& status) final {
    board_->Say(board_->FailedHere(status), /*final=*/false);
  }
  bool AllAnnounced(absl::Duration timeout) final {
    return board_->AllSaid(timeout);
  }
  void ClearAnnouncement() final { board_->TakeBack(); }

  // Unavailable if the process of `peer` has ended, or has closed its end of
  // this group. LOCAL.
  absl::Status EndOf(int peer) const;

 protected:
  // `abort` makes the wait under way return soon; called on another thread,
  // until the end of this object: it owns what it uses.
  WatchedCommunicator(const GroupOptions& options,
                      std::unique_ptr<Announcements> board,
                      std::function<void()> abort,
                      CommThread* thread = nullptr);

  // Runs the blocking part of a collective under the monitor. Returns OK if
  // `body` does, otherwise the best reason known; FailedPrecondition of `body`
  // means that the ranks are in different collectives.
  absl::Status Watched(const Call& call,
                       const std::function<absl::Status()>& body);
  WaitMonitor& monitor() { return monitor_; }

 private:
  // A rank that failed is soon in another collective than the others: what it
  // announces says more than that.
  absl::Status WithTheCause(const absl::Status& mismatch);

  const std::unique_ptr<Announcements> board_;
  WaitMonitor monitor_;
};

}  // namespace tessera
#endif  // COMM_WATCHED_COMMUNICATOR_H_
