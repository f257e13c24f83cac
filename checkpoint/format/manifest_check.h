// What may stand in a manifest: sizes that nothing overflows, names of their
// own, files whose parts lie in them.
#ifndef CHECKPOINT_FORMAT_MANIFEST_CHECK_H_
#define CHECKPOINT_FORMAT_MANIFEST_CHECK_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "checkpoint/format/manifest.pb.h"

namespace tessera {

// Protobuf's are 2 GiB.
inline constexpr size_t kMostMessageBytes = size_t{2000} << 20;

// DataLoss: what is wrong in the manifest or index of `path`.
absl::Status DamagedError(const std::string& path, absl::string_view what);

// DamagedError's, of the first thing that is wrong. O(its size). LOCAL.
absl::Status CheckManifest(const proto::CheckpointManifest& manifest,
                           const std::string& path);

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_MANIFEST_CHECK_H_
