// RunLock gives the folder of a run's checkpoints to one job.
//
// Two jobs in one folder would each remove what the other has saved, and resume
// from each other's steps. So a CheckpointManager holds DIR/job.lock as long as
// it lives; the file names the holder. It is not the lock of any step, since a
// folder may be a checkpoint's and a run's at once. No torch.
#ifndef CHECKPOINT_FORMAT_RUN_LOCK_H_
#define CHECKPOINT_FORMAT_RUN_LOCK_H_

#include <string>

#include "absl/status/statusor.h"
#include "checkpoint/disk/folder.h"

namespace tessera {

inline constexpr char kRunLockName[] = "job.lock";

// Holds the lock until it is destroyed or its process ends.
class RunLock {
 public:
  // Creates the folder if it is not there. Returns Unavailable, naming the
  // holder, if another job has the lock, and Unimplemented where the file
  // system has no locks. Other errors are the disk's. LOCAL.
  static absl::StatusOr<RunLock> Take(const std::string& dir,
                                      FileSystem* files);

 private:
  explicit RunLock(File file) : file_(std::move(file)) {}
  File file_;
};

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_RUN_LOCK_H_
