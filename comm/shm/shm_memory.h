// ShmMemory: the memory that the ranks of a host share, and what they do in it.
// Its team may be aborted until the end, from any thread.
#ifndef COMM_SHM_SHM_MEMORY_H_
#define COMM_SHM_SHM_MEMORY_H_

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/shm/collectives.h"
#include "comm/shm/map_peers.h"
#include "comm/shm/team.h"

namespace c10d {
class Store;
}

namespace tessera {

struct ShmMemory {
  ShmMemory(int rank, std::unique_ptr<shm::HostMemory> memory)
      : host(std::move(memory)),
        team(rank, host->members(), host->heap_bytes()),
        collectives(&team) {}
  ~ShmMemory() { team.Leave(); }
  ShmMemory(const ShmMemory&) = delete;
  ShmMemory& operator=(const ShmMemory&) = delete;

  // Before the first collective: how the communicator of these ranks sees its
  // waits. `names`, by rank here: what they are called in messages. `awaited`
  // is told for whom this rank is about to sleep; `end_of` says whether the
  // process of a rank that is slept for has ended. Ranks are those here.
  void Watch(std::vector<int> names, std::function<void(int peer)> awaited,
             std::function<absl::Status(int peer)> end_of);

  const std::unique_ptr<shm::HostMemory> host;
  shm::Team team;
  shm::Collectives collectives;
};

// As shm::MapPeers, but Aborted if the store fails; for at most
// shm::kMaxRanks ranks, Unavailable for more.
absl::StatusOr<std::shared_ptr<ShmMemory>> ConnectShm(
    c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
    absl::Duration timeout, const std::vector<int>& names = {});

}  // namespace tessera
#endif  // COMM_SHM_SHM_MEMORY_H_
