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

struct RunFolderOptions {
  std::string dir;
  FolderHolds holds = FolderHolds::kAll;
  // How long to wait for another job that has the folder.
  absl::Duration wait = absl::ZeroDuration();
  // The job saves at times of its own choice, so it needs to write there. A job
  // that does not may only read what is there.
  bool saves = true;
};

// Makes the folder and locks it, or each host's own (kPart). Unavailable names
// the job that has it. If no file can be made in it the error is the system's,
// or a warning if it holds checkpoints and `saves` is false. That it cannot be
// locked for other reasons (its file system has no locks) is only a warning.
// COLLECTIVE, blocking.
absl::StatusOr<RunFolder> TakeRunFolder(const RunFolderOptions& options,
                                        Communicator* comm);

}  // namespace tessera
#endif  // ENGINE_RUN_RUN_FOLDER_H_
