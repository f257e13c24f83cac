// Checks what a manifest says: sizes that do not overflow, unique names, files
// whose parts lie in them.
#ifndef CHECKPOINT_FORMAT_MANIFEST_CHECK_H_
#define CHECKPOINT_FORMAT_MANIFEST_CHECK_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "checkpoint/format/manifest.pb.h"

namespace tessera {

// Protobuf's limit is 2 GiB.
inline constexpr size_t kMostMessageBytes = size_t{2000} << 20;

// Returns DataLoss: what is wrong in the manifest or index of `path`.
absl::Status DamagedError(const std::string& path, absl::string_view what);

// Returns the DamagedError of the first thing that is wrong. O(its size).
// LOCAL.
absl::Status CheckManifest(const proto::CheckpointManifest& manifest,
                           const std::string& path);

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_MANIFEST_CHECK_H_
