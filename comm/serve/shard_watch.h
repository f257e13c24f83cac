// ShardWatch: when to give up waiting for shards of other ranks
// (comm/shard_server.h), and what to say. The same rules, times and words as
// for collectives (comm/watch/wait_monitor.h); that ranks are in different
// collectives is none of its business.
//
// Threads: one at a time. Asks the store, so it may block for a second.
#ifndef COMM_SERVE_SHARD_WATCH_H_
#define COMM_SERVE_SHARD_WATCH_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "comm/group_options.h"
#include "comm/watch/failure_domain.h"
#include "comm/watch/peer_progress.h"

namespace tessera {

// What this rank waits for, of one rank (itself among them): the shard that it
// has waited for longest.
struct AwaitedShard {
  std::string what;  // the pull: "unit a #7 (pull, 64 bytes of float32)"
  int64_t key = 0;
  int64_t version = 0;
  absl::Duration begin;  // MonotonicNow()
  // When that rank closed the connection.
  std::optional<absl::Duration> closed;
};

class ShardWatch {
 public:
  // `options` are the group's, which is of `domain`.
  ShardWatch(const GroupOptions& options,
             std::shared_ptr<FailureDomain> domain);

  // How often to ask.
  absl::Duration tick() const { return tick_; }
  // By rank; all are empty if nothing is waited for. OK: go on waiting.
  absl::Status Judge(const std::vector<std::optional<AwaitedShard>>& awaited);

 private:
  absl::Status JudgeEnded(const AwaitedShard& oldest) const;
  absl::Status JudgeClosed(
      const std::vector<std::optional<AwaitedShard>>& awaited) const;
  absl::Status JudgeAnnouncements(const AwaitedShard& oldest);
  absl::Status JudgeTime(
      const std::vector<std::optional<AwaitedShard>>& awaited) const;
  // What the ranks that cannot go on have said, the lowest first.
  absl::Status SaidOr(const absl::Status& otherwise) const;
  bool IsMember(int first_rank) const;

  const GroupOptions options_;
  const std::shared_ptr<FailureDomain> domain_;
  const absl::Duration tick_;
  absl::Duration read_at_;
  std::map<std::pair<int, int64_t>, absl::Duration> seen_;  // rank, count
  PeerProgress progress_;
};

}  // namespace tessera
#endif  // COMM_SERVE_SHARD_WATCH_H_
