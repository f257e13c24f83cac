// Finds the ranks that share hosts and GPUs, and chooses the backend. Every
// rank computes the same from the infos of all ranks, so no further agreement
// is needed. No torch.
#ifndef COMM_WORLD_BACKEND_CHOICE_H_
#define COMM_WORLD_BACKEND_CHOICE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/rendezvous/rank_info.h"

namespace tessera {

struct Neighbours {
  int local_rank = 0;
  int local_world_size = 1;
  std::vector<int> local_ranks;  // the ranks of this host
  // All ranks, and they reach each other over the loopback.
  bool same_host = true;
};
Neighbours FindNeighbours(const std::vector<RankInfo>& infos, int rank);

// By rank: a number of those that may share memory, which are on one host, in
// one network and of one memory group; by first rank, from 0.
std::vector<int> MemoryGroups(const std::vector<RankInfo>& infos);

// InvalidArgument for anything but "auto" and a name of comm/backend_table.h.
absl::Status CheckBackendName(absl::string_view name);

// A name of comm/backend_table.h. `wanted` is one, or "auto": nccl where each
// rank has a GPU of its own, shm where all ranks seem to be able to share
// memory (whether they are shows when they try), hierarchical where some are,
// else gloo. Returns InvalidArgument for another name, for shm and cuda_ipc
// with ranks on several hosts, for both backends of GPUs where a rank has none,
// and for nccl where two have the same: it names them, and what to take
// instead.
//
// Why "auto" is never cuda_ipc: where ranks share a GPU it would move a job
// that computes on the CPU now to a GPU on which W processes have W contexts
// and W shares of the memory, and take turns. And whether they can open each
// other's memory shows only when they try, when devices are chosen.
absl::StatusOr<std::string> ChooseBackend(const std::vector<RankInfo>& infos,
                                          absl::string_view wanted,
                                          bool built_with_nccl);

// The backend of `infos`, some of the ranks of a group whose backend is
// `whole`: the same, but of hierarchical what fits them, and "self" for one
// rank.
std::string BackendOfSubgroup(absl::string_view whole,
                              const std::vector<RankInfo>& infos);

// The device index that `rank` uses: its local rank among those it sees, -1
// without a GPU.
int DeviceOf(const std::vector<RankInfo>& infos, int rank);
// Returns DeviceOf where ChooseBackend gives a backend of devices; else -1, on
// all ranks.
int GpuOf(const std::vector<RankInfo>& infos, int rank,
          absl::string_view wanted, bool built_with_nccl);

}  // namespace tessera
#endif  // COMM_WORLD_BACKEND_CHOICE_H_
