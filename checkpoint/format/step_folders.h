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
#include "checkpoint/format/step_name.h"

namespace tessera {

struct StepFolder {
  std::string name;
  int64_t step = 0;  // of the name
  // Of the manifest; where that cannot be read, of the newest one of a lower
  // step: in doubt a checkpoint is new.
  int64_t saved_unix_micros = 0;
  // Why the manifest cannot be read; DataLoss: it is damaged.
  absl::Status manifest;
  bool is_file = false;  // and damaged therefore
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

// What a disk has for the next checkpoint.
struct DiskRoom {
  int64_t needed_bytes = 0;          // 0: not known
  int64_t free_bytes = -1;           // -1: not known
  std::vector<std::string> removed;  // older ones that had to go
};
// For a save that has found the disk of `dir` full, or would: removes what
// RemoveOldSteps does, and then, until there is room for one that is as large
// as `good`, and `least` in any case (a quota is not seen), what is damaged,
// and older ones that keep_last would keep. Never `good`, which must be known
// to be whole (empty: it removes no more than RemoveOldSteps), nor the newest
// whole one, nor what keep_every keeps. `least` < 0: only looks. LOCAL.
DiskRoom MakeRoom(const std::string& dir, const std::string& good,
                  const Retention& retention, int least, FileSystem* files,
                  FolderHolds holds = FolderHolds::kAll);

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_STEP_FOLDERS_H_
