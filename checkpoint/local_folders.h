// Handles checkpoints of which each host has a part, in a folder of its own
// disk, under one path (DeepSpeed's use_node_local_storage).
//
// A host has the data files of its ranks and the manifest, which names all
// files. The lowest rank of a host is its leader, which locks, commits and
// sweeps there. Where ranks load on other hosts than saved, or fewer, a host
// that has the missing files sends what they need (fetch_data_files.h).
#ifndef CHECKPOINT_LOCAL_FOLDERS_H_
#define CHECKPOINT_LOCAL_FOLDERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/disk/folder.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "checkpoint/format/step_folders.h"
#include "comm/communicator.h"

namespace tessera {

// Returns, by rank, the lowest rank that sees the same folder. COLLECTIVE.
absl::StatusOr<std::vector<int>> FindLeaders(const Folder& folder,
                                             Communicator* comm);
// Returns the ranks whose leader is `leader`, ascending.
std::vector<int> RanksOfLeader(const std::vector<int>& leaders, int leader);

// Opens the checkpoint in `dir` on the hosts that have one; it must be the same
// on all ranks. Creates the folder where it is not there. Returns NotFound if
// no host has one, FailedPrecondition if they have different ones, and the
// errors of OpenCheckpoint. COLLECTIVE, blocking.
absl::StatusOr<CheckpointReader> OpenLocalCheckpoint(const std::string& dir,
                                                     at::Device device,
                                                     Communicator* comm);

// A checkpoint of a run's folder (checkpoint/format/step_folders.h).
struct RunStep {
  int64_t step = 0;
  int64_t saved_unix_micros = 0;
};
// Lists the checkpoints in `dir`, those of any host with kPart, the last saved
// one first. Which are damaged is seen by who loads them. `where` is for
// errors, which are those of ListStepFolders. COLLECTIVE, blocking.
absl::StatusOr<std::vector<RunStep>> ListRunSteps(const std::string& dir,
                                                  FolderHolds holds,
                                                  absl::string_view where,
                                                  Communicator* comm);

}  // namespace tessera
#endif  // CHECKPOINT_LOCAL_FOLDERS_H_
