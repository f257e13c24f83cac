// Binds the ranks of a host to memory nodes (NUMA). No torch.
//
// On a host of several nodes each processor reaches one node's memory faster
// than the others'. Linux puts a page on the node of the thread that first
// writes it, so a rank whose threads stay on one node has its shards, states
// and working copies there, and steps them at that node's own bandwidth. That
// is all a rank needs; no page is moved or bound.
//
//   2 nodes, 4 ranks   node 0: ranks 0, 1     node 1: ranks 2, 3
//   4 nodes, 2 ranks   nodes 0, 1: rank 0     nodes 2, 3: rank 1
//
// torchrun: --numa-binding=node; DeepSpeed: --bind_cores_to_rank.
#ifndef COMM_LAUNCH_NUMA_H_
#define COMM_LAUNCH_NUMA_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tessera {

// The processors of each node that has some, in the order of nodes, as the
// kernel lists them: "0-3,8". None where it does not tell. `root` stands before
// /sys, for tests.
std::vector<std::string> NumaNodes(const std::string& root = "");

// Returns the processors that each rank of a host should run on; `cpus` are
// those that they may run on now. Blocks of consecutive ranks share a node, or
// each rank gets a block of nodes. Returns `cpus` where ranks differ, since
// they are bound already, or where they span fewer than two nodes.
std::vector<std::string> BindToNodes(const std::vector<std::string>& nodes,
                                     const std::vector<std::string>& cpus);

// Restricts this thread, and those that it starts from now on, to these
// processors. Errors are the system's.
absl::Status RunOn(absl::string_view cpus);

}  // namespace tessera
#endif  // COMM_LAUNCH_NUMA_H_
