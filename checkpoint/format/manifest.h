// Reads and writes the files of a checkpoint's folder
// (docs/checkpoint_format.md):
//
//   manifest                     proto::CheckpointManifest in a frame
//   0123456789abcdef.rank-00000  data: piece | pad | piece | ... | index
//   lock                         locked by the process that saves
//
// A save's data files have its id in their names, so they never replace those
// of another save; renaming the manifest is what makes the save the checkpoint.
// No torch.
#ifndef CHECKPOINT_FORMAT_MANIFEST_H_
#define CHECKPOINT_FORMAT_MANIFEST_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/format/manifest.pb.h"
#include "google/protobuf/message.h"

namespace tessera {

inline constexpr int kCheckpointFormat = 1;
inline constexpr char kManifestName[] = "manifest";
// In the folder of a run's checkpoints, this file names the newest one.
inline constexpr char kLatestName[] = "latest";
inline constexpr char kBestName[] = "best";
inline constexpr char kLockName[] = "lock";
inline constexpr int64_t kBlockBytes =
    64 << 10;  // each block has a checksum of its own

std::string DataFileName(uint64_t id, int rank);
// Returns the name of the manifest while it is being written.
std::string TemporaryManifestName(uint64_t id);
// Returns the id in the name of a data file or a temporary manifest.
std::optional<uint64_t> IdInName(absl::string_view name);

// Returns the bytes of the file "manifest". Returns ResourceExhausted beyond
// the 2 GiB that a protobuf message may have.
absl::StatusOr<std::string> EncodeManifest(
    const proto::CheckpointManifest& manifest);
// Returns whether the bytes begin as a manifest does.
bool BeginsAsManifest(absl::string_view bytes);
// Decodes the bytes of a manifest. Errors name `path`: FailedPrecondition if
// they are no manifest, or one of another format; DataLoss if it is truncated
// or damaged, or contradicts itself. The result can be relied on: every range
// lies in what it is a range of, no two tensors and no two states of one
// storage have the same name, and no sum of elements or bytes overflows. LOCAL.
absl::StatusOr<proto::CheckpointManifest> DecodeManifest(
    absl::string_view bytes, const std::string& path);

// Parses a message of manifest.proto. Unlike protobuf's own parser it allocates
// no more memory than `bytes` needs, whatever lengths the bytes claim. LOCAL.
bool ParseMessage(absl::string_view bytes, google::protobuf::Message* message);

// Returns the bytes of an element of a dtype of CheckpointState; 0 if there is
// no such dtype.
int64_t DtypeBytes(absl::string_view dtype);

// Encode and decode the index of a data file; errors are those of
// EncodeManifest and DecodeManifest.
absl::StatusOr<std::string> EncodeIndex(const proto::CheckpointIndex& index,
                                        proto::CheckpointFile* file);
absl::StatusOr<proto::CheckpointIndex> DecodeIndex(
    absl::string_view bytes, const proto::CheckpointManifest& manifest,
    int rank, const std::string& path);

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_MANIFEST_H_
