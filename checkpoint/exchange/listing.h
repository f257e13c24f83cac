// Tells what checkpoints hold, for people and for programs. No torch.
#ifndef CHECKPOINT_EXCHANGE_LISTING_H_
#define CHECKPOINT_EXCHANGE_LISTING_H_

#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/disk/folder.h"
#include "checkpoint/format/manifest.h"

namespace tessera {

// Returns one line: "step 7, 100 parameters, ...".
std::string SummaryLine(const proto::CheckpointManifest& manifest);

// Returns the same as the members of an object of JSON; what is not known is
// null. `dir`: where it lies.
std::string SummaryMembers(const std::string& dir,
                           const proto::CheckpointManifest& manifest);

// Returns which checkpoint a path means: the one of the highest step in it
// where it is a folder of checkpoints, as CheckpointManager's, and else the
// path. LOCAL.
std::string CheckpointAt(const std::string& path);

// Lists the checkpoints in `dir` and below it, to the third level. LOCAL.
// Returns NotFound if there is none, DataLoss, after listing all, if one cannot
// be read.
absl::Status ListCheckpoints(const std::string& dir, bool json,
                             std::ostream* out);

// Shows a checkpoint's tensors, states and files, and how it was trained;
// `config`: with the run's configuration. LOCAL. Returns errors of reading it.
absl::Status ShowCheckpoint(const std::string& dir, bool json, bool config,
                            std::ostream* out);

// What `tessera checkpoint rm` removes from a folder.
struct Removable {
  bool unfinished = false;  // no checkpoint, only files of an interrupted save
  std::string text;         // "step 7, 100 parameters, ...", for a terminal
};

// Looks for it without changing anything. LOCAL. Returns NotFound if there is
// neither a checkpoint nor a part of one, and FailedPrecondition if the
// manifest has another format.
absl::StatusOr<Removable> FindRemovable(const std::string& path,
                                        FileSystem* files);

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_LISTING_H_
