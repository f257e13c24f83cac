#include "comm/shm/shm_memory.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {

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
  // Not Unavailable, which all ranks see alike.
  if (!store_status.ok()) return absl::AbortedError(store_status.message());
  TESSERA_RETURN_IF_ERROR(host.status());
  return std::make_shared<ShmMemory>(rank, *std::move(host));
}

}  // namespace tessera
