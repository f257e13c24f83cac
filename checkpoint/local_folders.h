// Checkpoints of which each host has a part, in a folder of its own disk, under
// one path (DeepSpeed's use_node_local_storage).
//
// A host has the data files of its ranks and the manifest, which names all. One
// rank of a host, the lowest, is the leader, which locks, commits and sweeps
// there. Where ranks load on other hosts than saved, or fewer, what they need
// of files that their host lacks comes from a host that has them.
#ifndef CHECKPOINT_LOCAL_FOLDERS_H_
#define CHECKPOINT_LOCAL_FOLDERS_H_

#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/disk/folder.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "comm/communicator.h"

namespace tessera {

// By rank: the lowest rank that sees the same folder. COLLECTIVE.
absl::StatusOr<std::vector<int>> FindLeaders(const Folder& folder,
                                             Communicator* comm);
// Those of `leaders` that are the same as `rank`'s, ascending.
std::vector<int> RanksOfLeader(const std::vector<int>& leaders, int leader);

// The checkpoint in `dir` on the hosts that have one; the same on all ranks.
// The folder is made where it is not there. NotFound: no host has one;
// FailedPrecondition: they have different ones; and as OpenCheckpoint.
// COLLECTIVE, blocking.
absl::StatusOr<CheckpointReader> OpenLocalCheckpoint(const std::string& dir,
                                                     at::Device device,
                                                     Communicator* comm);

// Copies data files to hosts that lack them, as far as their ranks want
// something of them, and the index of the one of rank `values_of`; each rank's
// own wishes. They are sent to all ranks, through `device`, and stay in the
// folder. DataLoss names one that no host has. COLLECTIVE, blocking.
absl::Status FetchDataFiles(CheckpointReader* reader,
                            absl::Span<const WantedElements> wanted,
                            int values_of, at::Device device,
                            Communicator* comm);

}  // namespace tessera
#endif  // CHECKPOINT_LOCAL_FOLDERS_H_
