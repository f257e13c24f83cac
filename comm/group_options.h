// GroupOptions: one rank of a group, as every backend needs it.
#ifndef COMM_GROUP_OPTIONS_H_
#define COMM_GROUP_OPTIONS_H_

#include "absl/time/time.h"
#include "comm/communicator.h"

namespace tessera {

struct GroupOptions {
  int rank = 0;
  int world_size = 2;
  absl::Duration connect_timeout = absl::Seconds(60);
  absl::Duration collective_timeout = absl::Minutes(5);
  // How long a peer's announcement must stand before it ends a wait.
  absl::Duration announce_grace = kAnnounceGrace;
};

}  // namespace tessera
#endif  // COMM_GROUP_OPTIONS_H_
