#include "comm/world/rank_processors.h"

#include <algorithm>
#include <optional>
#include <string>

#include "ATen/Parallel.h"
#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/log.h"
#include "base/torch_guard.h"
#include "comm/comm_thread.h"
#include "comm/launch/cpus.h"
#include "comm/launch/numa.h"
#include "comm/world/backend_choice.h"

namespace tessera {

void BindToNodes(int rank, std::vector<RankInfo>* infos) {
  const Neighbours neighbours = FindNeighbours(*infos, rank);
  std::vector<std::string> cpus;
  for (int r : neighbours.local_ranks) cpus.push_back((*infos)[r].cpus);
  const std::vector<std::string> bound = BindToNodes(NumaNodes(), cpus);
  if (bound == cpus) {
    TESSERA_VLOG(comm, 1) << "numa_binding: nothing to bind";
    return;
  }
  for (size_t i = 0; i < bound.size(); ++i) {
    (*infos)[neighbours.local_ranks[i]].cpus = bound[i];
  }
  const absl::Status status = RunOn((*infos)[rank].cpus);
  if (!status.ok()) {
    TESSERA_LOG(WARNING) << "numa_binding: " << status.message()
                         << "; continuing without it";
  }
}

absl::Status SetThreads(const std::vector<RankInfo>& infos, int rank) {
  const Neighbours neighbours = FindNeighbours(infos, rank);
  std::vector<std::string> cpus;
  for (int r : neighbours.local_ranks) cpus.push_back(infos[r].cpus);
  const std::optional<double> limit = CgroupCpus();
  const int share = ThreadsOf(cpus, neighbours.local_rank, limit);
  if (share == 1) CommThread::Get().FollowCallers();
  if (const auto told = EnvString("OMP_NUM_THREADS")) {
    TESSERA_VLOG(comm, 1) << "threads: as OMP_NUM_THREADS=" << *told << " says";
    return absl::OkStatus();
  }
  return CatchTorch(
      "threads", [&] {
        const int threads = std::min(at::get_num_threads(), share);
        at::set_num_threads(threads);
        TESSERA_VLOG(comm, 1)
            << "threads: " << threads << ", for rank " << neighbours.local_rank
            << " of " << neighbours.local_world_size
            << " on this host, processors " << infos[rank].cpus
            << (limit ? absl::StrCat(", cgroup limit ", *limit) : "");
      });
}

}  // namespace tessera
