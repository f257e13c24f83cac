// GroupOptions: one rank of a group, as every backend needs it.
#ifndef COMM_GROUP_OPTIONS_H_
#define COMM_GROUP_OPTIONS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace tessera {

class FailureDomain;
class ShardServer;
class WatchedCommunicator;
struct Subgroup;

// Makes a subgroup. COLLECTIVE over its ranks, blocking.
using SubgroupMaker =
    std::function<absl::StatusOr<std::shared_ptr<Communicator>>(
        const Subgroup&)>;

// Connects the ranks of `group` for Communicator::ServeShards. COLLECTIVE,
// blocking. A function, so that groups need not know of servers.
using ShardServerMaker =
    std::function<absl::StatusOr<std::unique_ptr<ShardServer>>(
        WatchedCommunicator* group, const CommTag& tag)>;

struct GroupOptions {
  int rank = 0;
  int world_size = 2;
  absl::Duration connect_timeout = absl::Seconds(60);
  absl::Duration collective_timeout = absl::Minutes(5);
  // How long a peer's announcement must stand before it ends a wait.
  absl::Duration announce_grace = kAnnounceGrace;

  // For Communicator::Split; a group without this cannot be split.
  SubgroupMaker make_subgroup;
  // For Communicator::ServeShards; a group without this cannot serve.
  ShardServerMaker make_shard_server;

  // ---- of a group that was split off another ----

  std::shared_ptr<FailureDomain> domain;  // null: the group begins one
  std::string name;  // in messages, and unique in the domain
  // By rank, ascending: its rank in the domain's first group. Empty: the same.
  std::vector<int> first_ranks;

  int first_rank(int r) const {
    return first_ranks.empty() ? r : first_ranks[r];
  }
};

// Some of a group's ranks, this one among them.
struct Subgroup {
  std::string parent_backend;  // the whole group's
  std::vector<int> ranks;      // of the whole, ascending
  GroupOptions options;        // except make_subgroup
};

}  // namespace tessera
#endif  // COMM_GROUP_OPTIONS_H_
