// The checkpoints of one run, in a folder each:
//
//   DIR/step-00000120/   a checkpoint (checkpoint/format/checkpoint_folder.h)
//   DIR/step-00000240/
//   DIR/latest           "step-00000240\n", for people and scripts
//
// No torch, and nothing of ranks.
#ifndef CHECKPOINT_FORMAT_STEP_FOLDERS_H_
#define CHECKPOINT_FORMAT_STEP_FOLDERS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/disk/file_system.h"

namespace tessera {

// "step-00000120".
std::string StepFolderName(int64_t step);

struct StepFolder {
  std::string name;
  int64_t step = 0;  // of the name
  // Of the manifest; where that cannot be read, of the newest one of a lower
  // step: in doubt a checkpoint is new.
  int64_t saved_unix_micros = 0;
  // Why the manifest cannot be read; DataLoss: it is damaged.
  absl::Status manifest;
};

// Those that hold a checkpoint, the one that was saved last first; none where
// `dir` is not there. Reads manifests alone. LOCAL. FileError's.
absl::StatusOr<std::vector<StepFolder>> ListStepFolders(const std::string& dir,
                                                        FileSystem* files);

// Whether a folder has all of a checkpoint, or a part: the files of one host's
// ranks, and maybe others. Such a one is whole if some are there.
enum class FolderHolds { kAll, kPart };

// OK: all files of the checkpoint in `path` are there, of the sizes that its
// manifest says. DataLoss: it is certainly damaged. Any other error says
// nothing of the checkpoint, and may be gone the next time. LOCAL.
absl::Status CheckFilesOf(const std::string& path, FileSystem* files,
                          FolderHolds holds = FolderHolds::kAll);

// Makes `name` the text of DIR/latest, by a rename. LOCAL.
absl::Status WriteLatest(const std::string& dir, const std::string& name,
                         FileSystem* files);

struct Retention {
  int keep_last = 2;  // at least 1
  // Steps that are multiples stay for ever, and do not count for keep_last; 0:
  // none.
  int64_t keep_every = 0;
  // By name, why it could not be loaded. Their files may have the right sizes:
  // they do not count, and DataLoss is damage.
  std::map<std::string, absl::Status> passed_over;
};
// Removes the step folders that are not to be kept, and what interrupted saves
// left in others; never `saved`, which has just been saved, nor one that
// another process saves to, nor a file that is no checkpoint's. Only whole ones
// count for keep_last; what cannot be read now is left alone. Names what it
// could not remove. Besides manifests of what does not stay for ever it opens
// the data files of the last ones. LOCAL.
absl::Status RemoveOldSteps(const std::string& dir, const std::string& saved,
                            const Retention& retention, FileSystem* files,
                            FolderHolds holds = FolderHolds::kAll);

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_STEP_FOLDERS_H_
