// The transport of CPU ranks on one host: collectives in memory that all of
// them map (comm/shm/collectives.h). What lies in counted memory
// (base/memory/memory.h) is read where it is; anything else is staged.
#ifndef COMM_SHM_SHM_TRANSPORT_H_
#define COMM_SHM_SHM_TRANSPORT_H_

#include <memory>

#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/group_options.h"
#include "comm/transport.h"

namespace c10d {
class Store;
}

namespace tessera {

// COLLECTIVE, blocking, for at most shm::kMaxRanks ranks. `store` must hold
// keys of this group only. Returns Unavailable, the same on all ranks, if they
// cannot share memory.
absl::StatusOr<std::shared_ptr<Transport>> ConnectShmTransport(
    const c10::intrusive_ptr<c10d::Store>& store, const GroupOptions& options);

}  // namespace tessera
#endif  // COMM_SHM_SHM_TRANSPORT_H_
