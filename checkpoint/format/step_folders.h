// Manages the checkpoints of one run, each in a folder of its own:
//
//   DIR/step-00000120/   a checkpoint (checkpoint/format/checkpoint_folder.h)
//   DIR/step-00000240/
//   DIR/latest           "step-00000240\n", for people and scripts
//   DIR/best             the same of the one with the best metric, if any
//
// No torch, and nothing of ranks.
#ifndef CHECKPOINT_FORMAT_STEP_FOLDERS_H_
#define CHECKPOINT_FORMAT_STEP_FOLDERS_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/disk/file_system.h"
#include "checkpoint/format/step_name.h"

namespace tessera {

struct StepFolder {
  std::string name;
  int64_t step = 0;  // the step in the name
  // The time in the manifest. If the manifest cannot be read, that of the
  // newest checkpoint of a lower step: in doubt a checkpoint is new.
  int64_t saved_unix_micros = 0;
  // Why the manifest cannot be read; DataLoss if it is damaged.
  absl::Status manifest;
  bool is_file = false;  // it is a file, and therefore damaged
};

// Lists the folders that hold a checkpoint, the last saved one first; an empty
// list if `dir` is not there. Reads manifests alone. LOCAL. Errors are those of
// FileError.
absl::StatusOr<std::vector<StepFolder>> ListStepFolders(const std::string& dir,
                                                        FileSystem* files);

// FolderHolds says whether a folder has all of a checkpoint, or a part: the
// files of one host's ranks, and maybe others. A part is whole if some files
// are there.
enum class FolderHolds { kAll, kPart };

// Returns OK if all files of the checkpoint in `path` are there, of the sizes
// that its manifest says, and DataLoss if it is certainly damaged. Any other
// error says nothing about the checkpoint, and may be gone the next time.
// LOCAL.
absl::Status CheckFilesOf(const std::string& path, FileSystem* files,
                          FolderHolds holds = FolderHolds::kAll);

// Replace the text of DIR/latest, or of DIR/best, by `name`, by a rename.
// LOCAL.
absl::Status WriteLatest(const std::string& dir, const std::string& name,
                         FileSystem* files);
absl::Status WriteBest(const std::string& dir, const std::string& name,
                       FileSystem* files);

struct Retention {
  int keep_last = 2;  // at least 1
  // Steps that are multiples of this stay for ever, and do not count for
  // keep_last; 0: none.
  int64_t keep_every = 0;
  // Names of checkpoints that stay like those of keep_every: the best ones.
  std::set<std::string> keep;
  // By name, why a checkpoint could not be loaded, though its files may have
  // the right sizes. Such a checkpoint does not count for keep_last; DataLoss
  // means that it is damaged.
  std::map<std::string, absl::Status> passed_over;
};
// Removes the step folders that are not to be kept, and what interrupted saves
// left in others. It never removes `saved`, which has just been saved, a folder
// that another process saves to, or a file that is no checkpoint's. Only whole
// checkpoints count for keep_last; what cannot be read now is left alone.
// Errors name what it could not remove. It opens the manifests of checkpoints
// that do not stay for ever, and the data files of the last ones. Adds the
// names of undamaged checkpoints that it has removed to `removed`, unless that
// is null. LOCAL.
absl::Status RemoveOldSteps(const std::string& dir, const std::string& saved,
                            const Retention& retention, FileSystem* files,
                            FolderHolds holds = FolderHolds::kAll,
                            std::vector<std::string>* removed = nullptr);

// DiskRoom is what a disk has for the next checkpoint.
struct DiskRoom {
  int64_t needed_bytes = 0;          // 0: not known
  int64_t free_bytes = -1;           // -1: not known
  std::vector<std::string> removed;  // older ones that had to go
};
// Makes room for a save that has found the disk of `dir` full, or would. It
// removes what RemoveOldSteps does. Then it removes damaged checkpoints, and
// older ones that keep_last would keep, until there is room for one as large as
// `good`, and at least `least` of them (a quota cannot be seen). It never
// removes `good`, which must be known to be whole (if empty, no more goes than
// RemoveOldSteps removes), the newest whole one, or what keep_every and `keep`
// keep.
// `least` < 0: removes nothing, only looks. LOCAL.
DiskRoom MakeRoom(const std::string& dir, const std::string& good,
                  const Retention& retention, int least, FileSystem* files,
                  FolderHolds holds = FolderHolds::kAll);

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_STEP_FOLDERS_H_
