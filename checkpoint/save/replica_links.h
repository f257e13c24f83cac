// ReplicaLinks copies each rank's data file to a second host. Each rank sends
// its file to its keeper, a rank of the next host, and writes the files that it
// keeps into the folder of its own host, under the same names:
//
//   host A   rank 0 ----> rank 2   host B ----> ...   the last one's keepers
//            rank 1 ----> rank 3                      are on the first
//
// So a job that has lost a host, or every other host, can load what was saved;
// and where the folders are in memory (/dev/shm), it does so without any disk.
//
// Z. Wang et al., GEMINI: Fast Failure Recovery in Distributed Training with
// In-Memory Checkpoints (SOSP 2023).
#ifndef CHECKPOINT_SAVE_REPLICA_LINKS_H_
#define CHECKPOINT_SAVE_REPLICA_LINKS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/disk/folder.h"
#include "comm/communicator.h"
#include "comm/serve/shard_mesh.h"

namespace tessera {

// Returns each rank's keeper; `leaders` is by rank, too
// (checkpoint/local_folders.h). Empty where there is one host.
std::vector<int> KeepersOf(const std::vector<int>& leaders);

class ReplicaLinks {
 public:
  // Connects this rank with its keeper and with the ranks whose keeper it is.
  // COLLECTIVE, blocking. Returns Unavailable, the same error on all ranks.
  static absl::StatusOr<std::unique_ptr<ReplicaLinks>> Connect(
      const std::vector<int>& keepers, Communicator* comm);
  const std::vector<int>& keepers() const { return keepers_; }

  // Sends this rank's data file of the save `id` in `folder` to the keeper, and
  // writes those that it keeps; when it returns all are on the disk, here and
  // at the keeper. All ranks call it, each at any time. Returns Cancelled as
  // soon as `given_up` returns true, and Unavailable naming a rank that has
  // ended. After an error the links cannot be used any more. LOCAL, blocking.
  absl::Status Exchange(const Folder& folder, uint64_t id,
                        const std::function<bool()>& given_up);

 private:
  ReplicaLinks(std::vector<int> keepers, int rank,
               std::unique_ptr<ShardMesh> mesh)
      : keepers_(std::move(keepers)), rank_(rank), mesh_(std::move(mesh)) {}

  const std::vector<int> keepers_;
  const int rank_;
  const std::unique_ptr<ShardMesh> mesh_;
};

}  // namespace tessera
#endif  // CHECKPOINT_SAVE_REPLICA_LINKS_H_
