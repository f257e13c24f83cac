// MakeGroup: the communicator of a group from what its ranks know of each other
// (comm/world/backend_choice.h).
#ifndef COMM_WORLD_MAKE_GROUP_H_
#define COMM_WORLD_MAKE_GROUP_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/communicator.h"
#include "comm/group_options.h"
#include "comm/world/backend_choice.h"

namespace c10d {
class Store;
}

namespace tessera {

struct GroupPlan {
  GroupOptions options;
  std::vector<RankInfo> infos;   // by rank
  std::string backend = "auto";  // see WorldOptions
  int device = -1;               // this rank's GPU; -1 without
  bool ordered_sums = true;      // see WorldOptions
};

// COLLECTIVE over the group's ranks, blocking; plans differ in rank and device
// only. `store` must hold keys of this group only. `client` is another client
// of the same, in which subgroups are made later. Returns what ChooseBackend
// and the backend's maker return.
absl::StatusOr<std::shared_ptr<Communicator>> MakeGroup(
    const GroupPlan& plan, c10::intrusive_ptr<c10d::Store> store,
    c10::intrusive_ptr<c10d::Store> client);

}  // namespace tessera
#endif  // COMM_WORLD_MAKE_GROUP_H_
