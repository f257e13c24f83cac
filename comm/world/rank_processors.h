// Sets the processors of its host that a rank computes on, and its number of
// threads.
#ifndef COMM_WORLD_RANK_PROCESSORS_H_
#define COMM_WORLD_RANK_PROCESSORS_H_

#include <vector>

#include "absl/status/status.h"
#include "comm/rendezvous/rank_info.h"

namespace tessera {

// This thread, and those that it starts from now on, stay on this rank's nodes
// of memory (comm/launch/numa.h). All ranks of a host see the same nodes, so
// `infos` of each say afterwards where the others run. What the system refuses
// is a warning. LOCAL; all ranks of a host, or none.
void BindToNodes(int rank, std::vector<RankInfo>* infos);

// libtorch's threads: this rank's share of the host, never more than libtorch
// takes by itself. OMP_NUM_THREADS goes before (torchrun sets it, to 1). LOCAL.
absl::Status SetThreads(const std::vector<RankInfo>& infos, int rank);

}  // namespace tessera
#endif  // COMM_WORLD_RANK_PROCESSORS_H_
