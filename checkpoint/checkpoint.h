// Checkpoint: a folder with one file of raw chunks per rank and a manifest.
//
//   DIR/manifest.textproto   checkpoint/manifest.proto, written last
//   DIR/rank-00000.bin       chunk | pad to 4096 | chunk | pad | ...
//
// Written as DIR.tmp, every file and the folder fsynced, then renamed (or
// exchanged with the DIR that is there) in one step: under its name a
// checkpoint is complete, always. Each chunk carries a fingerprint, checked
// before anything is loaded.
#ifndef CHECKPOINT_CHECKPOINT_H_
#define CHECKPOINT_CHECKPOINT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/manifest.pb.h"
#include "comm/communicator.h"

namespace tessera {

// A piece of state: bytes to write, or to be filled.
struct CheckpointPart {
  std::string name;
  at::Tensor bytes;  // uint8, contiguous, any device
};

// Writes this rank's parts. `head` holds stage, step, model and the size of
// shard groups; the rest is filled in. Any rank's error (disk full, no
// permission) is returned on all, and what was under `dir` before stays.
// COLLECTIVE.
absl::Status WriteCheckpoint(const std::string& dir,
                             const proto::CheckpointManifest& head,
                             absl::Span<const CheckpointPart> parts,
                             Communicator* comm);

// Reads and checks the manifest of `dir` against what is expected of it.
// NotFound, DataLoss (not a manifest, a file missing), FailedPrecondition
// naming what differs (world size, shard group, stage, model, format). LOCAL.
absl::StatusOr<proto::CheckpointManifest> ReadManifest(
    const std::string& dir, const proto::CheckpointManifest& expected);

// Checks every chunk of this rank's file; DataLoss names the first bad one.
// LOCAL.
absl::Status VerifyRankFile(const std::string& dir,
                            const proto::CheckpointFile& file);

// Fills one part; its name and size must be the file's. LOCAL.
absl::Status ReadPart(const std::string& dir, const proto::CheckpointFile& file,
                      CheckpointPart* part);
// A chunk of any size, as a string.
absl::StatusOr<std::string> ReadText(const std::string& dir,
                                     const proto::CheckpointFile& file,
                                     absl::string_view name);

}  // namespace tessera
#endif  // CHECKPOINT_CHECKPOINT_H_
