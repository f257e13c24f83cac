// GroupOptions: one rank of a group, as every backend needs it.
#ifndef COMM_GROUP_OPTIONS_H_
#define COMM_GROUP_OPTIONS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "comm/communicator.h"

namespace tessera {

class FailureDomain;  // comm/watch/failure_domain.h

struct GroupOptions {
  int rank = 0;
  int world_size = 2;
  absl::Duration connect_timeout = absl::Seconds(60);
  absl::Duration collective_timeout = absl::Minutes(5);
  // How long a peer's announcement must stand before it ends a wait.
  absl::Duration announce_grace = kAnnounceGrace;

  // ---- of a group that was split off another ----

  std::shared_ptr<FailureDomain> domain;  // null: the group begins one
  std::string name;  // in messages, and unique in the domain
  // By rank, ascending: its rank in the domain's first group. Empty: the same.
  std::vector<int> first_ranks;

  int first_rank(int r) const {
    return first_ranks.empty() ? r : first_ranks[r];
  }
};

}  // namespace tessera
#endif  // COMM_GROUP_OPTIONS_H_
