#include "sharding/copy/lone_copy.h"

namespace tessera {

absl::StatusOr<FlatBuffer> LoneCopy::AllocateWhole() {
  if (shard().elsewhere()) return GatheredCopy::AllocateWhole();
  return FlatBuffer::Over(shard().memory().data(), shard().numel(),
                          flat_.dtype(),
                          /*counted=*/std::nullopt);
}

// It is there when an update of it that goes on has ended.
absl::StatusOr<CommFuture> LoneCopy::Launch() {
  if (shard().elsewhere()) return GatheredCopy::Launch();
  return updated_;
}

absl::Status LoneCopy::Save() {
  return shard().elsewhere() ? absl::OkStatus() : SaveWhole();
}

}  // namespace tessera
