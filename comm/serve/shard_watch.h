// ShardWatch: decides when to give up waiting for shards of other ranks
// (comm/shard_server.h), and with which error. The rules and times are those of
// collectives (comm/watch/wait_judge.h), and two more: a rank has closed its
// connection, or its shards have not come in time.
//
// Threads: one at a time. Asks the store, so it may block for a second.
#ifndef COMM_SERVE_SHARD_WATCH_H_
#define COMM_SERVE_SHARD_WATCH_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "comm/group_options.h"
#include "comm/watch/failure_domain.h"
#include "comm/watch/wait_judge.h"

namespace tessera {

// What this rank waits for, of one rank (itself among them): the shard that it
// has waited for longest.
struct AwaitedShard {
  std::string what;  // the pull: "unit a #7 (pull, 64 bytes of float32)"
  int64_t key = 0;
  int64_t version = 0;   // kPosted: a message (comm/serve/shard_streams.h)
  absl::Duration begin;  // the time of the domain's Announcements
  // When that rank closed the connection.
  std::optional<absl::Duration> closed;
};

class ShardWatch {
 public:
  // By rank; empty where nothing is waited for.
  using Awaited = std::vector<std::optional<AwaitedShard>>;

  // `options` are the group's, which is of `domain`.
  ShardWatch(const GroupOptions& options,
             std::shared_ptr<FailureDomain> domain);

  // How often to call Judge.
  absl::Duration tick() const { return judge_.tick(); }
  // Returns the error with which to give up; OK: keep waiting.
  absl::Status Judge(const Awaited& awaited);

 private:
  absl::Status JudgeClosed(const Awaited& awaited) const;
  absl::Status JudgeTime(const Awaited& awaited) const;

  const std::shared_ptr<FailureDomain> domain_;
  const std::vector<int> ranks_;  // of the group, as the domain calls them
  WaitJudge judge_;
};

}  // namespace tessera
#endif  // COMM_SERVE_SHARD_WATCH_H_
