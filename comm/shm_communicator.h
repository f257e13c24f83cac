// The communicator of CPU ranks on one host: collectives in memory that all of
// them map (comm/shm/collectives.h). What lies in counted memory
// (base/memory.h) is read where it is; anything else is staged.
//
// Tensors of other devices go through host memory.
#ifndef COMM_SHM_COMMUNICATOR_H_
#define COMM_SHM_COMMUNICATOR_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/communicator.h"

namespace c10d {
class Store;
}

namespace tessera {

struct ShmCommunicatorOptions {
  int rank = 0;
  int world_size = 2;  // 2 to shm::kMaxRanks
  absl::Duration connect_timeout = absl::Seconds(60);
  absl::Duration collective_timeout = absl::Minutes(5);
  // How long a peer's announcement must stand before it ends a wait.
  absl::Duration announce_grace = kAnnounceGrace;
};

// COLLECTIVE, blocking. `store` must hold keys of this communicator only.
// Returns Unavailable, on all ranks alike, if they cannot share memory.
absl::StatusOr<std::shared_ptr<Communicator>> MakeShmCommunicator(
    c10::intrusive_ptr<c10d::Store> store,
    const ShmCommunicatorOptions& options);

}  // namespace tessera
#endif  // COMM_SHM_COMMUNICATOR_H_
