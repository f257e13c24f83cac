#include "comm/shm/shm_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/watch/failure_domain.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {

// A rank can go in two ways. One that leaves this group may live on, so that
// only its memory tells; one whose process ended can tell nothing, so that only
// its connection to the others does. Without both a wait for it would last
// until the timeout.
void ShmMemory::Watch(std::vector<int> names,
                      std::function<void(int peer)> awaited,
                      std::function<absl::Status(int peer)> end_of) {
  collectives.exchange().SetNames(names);
  team.SetOnSleep(std::move(awaited));
  team.SetGone(
      [this, names = std::move(names), end_of = std::move(end_of)](int peer) {
        return team.HasLeft(peer) ? HasEnded(names[peer], true) : end_of(peer);
      });
}

absl::StatusOr<std::shared_ptr<ShmMemory>> ConnectShm(
    c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
    absl::Duration timeout, const std::vector<int>& names) {
  if (world_size > shm::kMaxRanks) {
    return absl::UnavailableError(absl::StrCat("shm carries at most ",
                                               shm::kMaxRanks, " ranks, there ",
                                               "are ", world_size));
  }
  absl::StatusOr<std::unique_ptr<shm::HostMemory>> host =
      absl::UnknownError("");
  // Its own client: it blocks in the store, where others must get through.
  const absl::Status store_status = CatchTorch("store", [&] {
    host = shm::MapPeers(*store->clone(), rank, world_size, timeout, names);
  });
  // Not Unavailable: that means that all ranks see the same.
  if (!store_status.ok()) return absl::AbortedError(store_status.message());
  TESSERA_RETURN_IF_ERROR(host.status());
  return std::make_shared<ShmMemory>(rank, *std::move(host));
}

}  // namespace tessera
