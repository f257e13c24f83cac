// The files of a checkpoint's folder (docs/checkpoint_format.md):
//
//   manifest                     proto::CheckpointManifest in a frame
//   0123456789abcdef.rank-00000  data: piece | pad | piece | ... | index
//   lock                         locked by who saves
//
// A save's data files have its id in their names, so they never take the place
// of another's; the rename of the manifest is what makes it the checkpoint.
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
// In the folder of a run's checkpoints, names the newest.
inline constexpr char kLatestName[] = "latest";
inline constexpr char kLockName[] = "lock";
inline constexpr int64_t kBlockBytes = 64 << 10;  // with a checksum of its own

std::string DataFileName(uint64_t id, int rank);
// The manifest while it is written.
std::string TemporaryManifestName(uint64_t id);
// The id in a name of a data file or a temporary manifest.
std::optional<uint64_t> IdInName(absl::string_view name);

// The bytes of the file "manifest". ResourceExhausted: more than the 2 GiB that
// a message may have.
absl::StatusOr<std::string> EncodeManifest(
    const proto::CheckpointManifest& manifest);
// Whether they begin as a manifest does.
bool BeginsAsManifest(absl::string_view bytes);
// With `path`: FailedPrecondition if they are no manifest, or one of another
// format; DataLoss if it is cut off or damaged, or what it says cannot be. What
// is returned can be relied on: every range lies in what it is a range of, no
// two tensors and no two states of one have the same name, and no sum of
// elements or bytes over any of it overflows. LOCAL.
absl::StatusOr<proto::CheckpointManifest> DecodeManifest(
    absl::string_view bytes, const std::string& path);

// Parses a message of manifest.proto. Unlike protobuf's own it sets aside no
// more memory than `bytes` has need of, whatever lengths they name. LOCAL.
bool ParseMessage(absl::string_view bytes, google::protobuf::Message* message);

// Bytes of an element of a dtype of CheckpointState; 0 if there is none such.
int64_t DtypeBytes(absl::string_view dtype);

// The same for the index of data file number `rank`.
absl::StatusOr<std::string> EncodeIndex(const proto::CheckpointIndex& index,
                                        proto::CheckpointFile* file);
absl::StatusOr<proto::CheckpointIndex> DecodeIndex(
    absl::string_view bytes, const proto::CheckpointManifest& manifest,
    int rank, const std::string& path);

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_MANIFEST_H_
