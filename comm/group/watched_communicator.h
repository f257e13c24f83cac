// WatchedCommunicator: what the backends of several ranks share. Each of their
// collectives runs under a monitor (comm/watch/wait_monitor.h), the ranks tell
// each other of failures (comm/watch/announcements.h), and they can be split.
#ifndef COMM_GROUP_WATCHED_COMMUNICATOR_H_
#define COMM_GROUP_WATCHED_COMMUNICATOR_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/group/queued_communicator.h"
#include "comm/group_options.h"
#include "comm/note_board.h"
#include "comm/shard_server.h"
#include "comm/watch/failure_domain.h"

namespace tessera {

class WatchedCommunicator : public QueuedCommunicator {
 public:
  ~WatchedCommunicator() override;

  absl::StatusOr<std::shared_ptr<Communicator>> Split(int color,
                                                      CommTag name) final;

  absl::StatusOr<std::unique_ptr<ShardServer>> ServeShards(CommTag tag) final;
  absl::StatusOr<std::unique_ptr<NoteBoard>> ShareNotes(CommTag tag) final;

  void Announce(const absl::Status& status) final { domain_->Announce(status); }
  bool AllAnnounced(absl::Duration timeout) final {
    return domain_->announcements().AllPosted(timeout, watched_->ranks);
  }
  void ClearAnnouncement() final { domain_->announcements().Retract(); }

  // Unavailable if the process of `peer` has ended, or has left. LOCAL.
  absl::Status EndOf(int peer) const {
    return domain_->EndOf(options_.first_rank(peer));
  }

  // For classes that do some of the group's work (comm/serve).
  const GroupOptions& options() const { return options_; }
  const std::shared_ptr<FailureDomain>& domain() const { return domain_; }
  using QueuedCommunicator::costs;
  using QueuedCommunicator::records;

 protected:
  // `domain` is that of FailureDomain::Join. `abort` makes the wait under way
  // return soon; called on another thread: it owns what it uses.
  WatchedCommunicator(const GroupOptions& options,
                      std::shared_ptr<FailureDomain> domain,
                      std::function<void()> abort, TensorsSeen tensors);

  // Runs the blocking part of a collective under the monitor. Returns OK if
  // `body` does, otherwise the best reason known; FailedPrecondition of `body`
  // means that the ranks are in different collectives.
  absl::Status Watched(const Call& call,
                       const std::function<absl::Status()>& body) {
    return WatchedBy(&domain_->monitor(), call, body);
  }
  // By another monitor of the domain.
  absl::Status WatchedBy(WaitMonitor* monitor, const Call& call,
                         const std::function<absl::Status()>& body);
  // It is rank `peer` whose message is waited for now.
  void SetAwaited(int peer) {
    domain_->monitor().SetAwaited(options_.first_rank(peer));
  }
  // What the ranks are called in messages.
  const std::vector<int>& names() const { return watched_->ranks; }

 private:
  void TellFailure(const absl::Status& status) final {
    domain_->Announce(status, /*final=*/true);
  }
  // A rank that failed is soon in another collective than the others: what it
  // announces says more than that.
  absl::Status WithTheCause(const absl::Status& mismatch);

  // This rank's subgroup, by the colors of all ranks.
  Subgroup SubgroupOf(const std::string& name,
                      const std::vector<std::string>& colors) const;

  const GroupOptions options_;
  const std::shared_ptr<FailureDomain> domain_;
  const std::shared_ptr<const WatchedGroup> watched_;
  std::atomic<int> splits_{0};
  std::atomic<int> boards_{0};
};

}  // namespace tessera
#endif  // COMM_GROUP_WATCHED_COMMUNICATOR_H_
