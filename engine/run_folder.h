// Whose the folder of a run's checkpoints is: this job's, and which of its
// ranks does there what one rank does.
#ifndef ENGINE_RUN_FOLDER_H_
#define ENGINE_RUN_FOLDER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/format/run_lock.h"
#include "checkpoint/format/step_folders.h"
#include "comm/communicator.h"

namespace tessera {

struct RunFolder {
  bool leads = false;             // this rank does it
  std::unique_ptr<RunLock> lock;  // null: it does not, or cannot be locked
};

// Makes `dir` and locks it, or the one of each host (kPart); waits so long for
// another job that has it. Unavailable names that; where a folder cannot be
// locked otherwise there is a warning. COLLECTIVE, blocking.
absl::StatusOr<RunFolder> TakeRunFolder(const std::string& dir,
                                        FolderHolds holds, absl::Duration wait,
                                        Communicator* comm);

}  // namespace tessera
#endif  // ENGINE_RUN_FOLDER_H_
