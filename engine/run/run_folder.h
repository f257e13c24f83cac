// RunFolder: locks the folder of a run's checkpoints for this job, and says
// which ranks do the work that one rank does per folder.
#ifndef ENGINE_RUN_RUN_FOLDER_H_
#define ENGINE_RUN_RUN_FOLDER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/format/run_lock.h"
#include "checkpoint/format/step_folders.h"
#include "comm/communicator.h"

namespace tessera {

struct RunFolder {
  bool leads = false;  // this rank does that work
  std::unique_ptr<RunLock>
      lock;  // null: it does not lead, or the folder cannot be locked
};

// Makes `dir` and locks it, or each host's own (kPart); waits up to `wait` for
// another job that has it. Unavailable names that job; a folder that cannot be
// locked for other reasons is only a warning. COLLECTIVE, blocking.
absl::StatusOr<RunFolder> TakeRunFolder(const std::string& dir,
                                        FolderHolds holds, absl::Duration wait,
                                        Communicator* comm);

}  // namespace tessera
#endif  // ENGINE_RUN_RUN_FOLDER_H_
