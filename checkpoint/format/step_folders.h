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
  int64_t saved_unix_micros = 0;
  // All its files are there, of the sizes that the manifest says.
  bool whole = false;
};

// Whether a folder has all of a checkpoint, or a part: the files of one host's
// ranks, and maybe others. Such a one is whole if some are there.
enum class FolderHolds { kAll, kPart };

// Those that hold a checkpoint, the one that was saved last first; none where
// `dir` is not there. LOCAL. FileError's.
absl::StatusOr<std::vector<StepFolder>> ListStepFolders(
    const std::string& dir, FileSystem* files,
    FolderHolds holds = FolderHolds::kAll);

// Makes `name` the text of DIR/latest, by a rename. LOCAL.
absl::Status WriteLatest(const std::string& dir, const std::string& name,
                         FileSystem* files);

struct Retention {
  int keep_last = 2;       // at least 1
  int64_t keep_every = 0;  // steps that are multiples stay for ever; 0: none
};
// Removes the step folders that are not to be kept, and what interrupted saves
// left in others; never `saved`, which has just been saved, nor one that
// another process saves to, nor a file that is no checkpoint's. Only whole ones
// count for keep_last. Names what it could not remove. LOCAL.
absl::Status RemoveOldSteps(const std::string& dir, const std::string& saved,
                            const Retention& retention, FileSystem* files,
                            FolderHolds holds = FolderHolds::kAll);

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_STEP_FOLDERS_H_
