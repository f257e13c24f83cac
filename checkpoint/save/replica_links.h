// ReplicaLinks: how each rank's data file gets to a second host. Each rank
// sends its file to its keeper, a rank of the next host, and writes those of
// which it is the keeper into the folder of its own host, under the same names:
//
//   host A   rank 0 ----> rank 2   host B ----> ...   the last one's keepers
//            rank 1 ----> rank 3                      are on the first
//
// So a job that has lost a host, or all but every other one, loads what was
// saved; and where the folders are in memory (/dev/shm), without any disk.
//
// Z. Wang et al., GEMINI: Fast Failure Recovery in Distributed Training with
// In-Memory Checkpoints (SOSP 2023).
#ifndef CHECKPOINT_SAVE_REPLICA_LINKS_H_
#define CHECKPOINT_SAVE_REPLICA_LINKS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/disk/folder.h"
#include "comm/communicator.h"

namespace tessera {

// By rank, its keeper; `leaders` by rank, too (checkpoint/local_folders.h).
// Empty where there is one host.
std::vector<int> KeepersOf(const std::vector<int>& leaders);

class ReplicaLinks {
 public:
  // Connects this rank with its keeper, and those with it of whom it is the
  // keeper. COLLECTIVE, blocking; the same error on all ranks: Unavailable.
  static absl::StatusOr<std::unique_ptr<ReplicaLinks>> Connect(
      const std::vector<int>& keepers, Communicator* comm);
  ~ReplicaLinks();

  const std::vector<int>& keepers() const { return keepers_; }

  // Sends this rank's data file of the save `id` in `folder`, and writes those
  // of others; all are on the disk then, here and at the keeper. All ranks call
  // it, each when it likes. Cancelled as soon as `given_up` says so;
  // Unavailable naming a rank that has ended. After an error the links are of
  // no use. LOCAL, blocking.
  absl::Status Exchange(const Folder& folder, uint64_t id,
                        const std::function<bool()>& given_up);

 private:
  ReplicaLinks(std::vector<int> keepers, int rank);
  absl::Status ConnectOwn(const std::vector<std::string>& places,
                          const std::string& network, int listen_fd,
                          const std::string& token);

  const std::vector<int> keepers_;
  const int rank_;
  int out_ = -1;         // to the keeper
  std::vector<int> in_;  // by rank; -1: this one keeps nothing of it
};

}  // namespace tessera
#endif  // CHECKPOINT_SAVE_REPLICA_LINKS_H_
