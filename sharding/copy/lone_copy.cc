#include "sharding/copy/lone_copy.h"

#include "base/status.h"

namespace tessera {

absl::StatusOr<std::unique_ptr<WorkingCopy>> LoneCopy::Make(
    const FlatDescription* flat, std::atomic<int64_t>* live) {
  auto copy = std::unique_ptr<LoneCopy>(new LoneCopy(flat, Traits(), live));
  TESSERA_RETURN_IF_ERROR(copy->AllocateShard());
  return copy;
}

absl::StatusOr<FlatBuffer> LoneCopy::AllocateWhole() {
  if (shard_.elsewhere()) return GatheredCopy::AllocateWhole();
  return FlatBuffer::Over(shard_.memory().data(), shard_.numel(), flat_.dtype(),
                          /*counted=*/std::nullopt);
}

// It is there when an update of it that goes on has ended.
absl::StatusOr<CommFuture> LoneCopy::Launch() {
  if (shard_.elsewhere()) return GatheredCopy::Launch();
  return updated_;
}

absl::Status LoneCopy::Save() {
  return shard_.elsewhere() ? absl::OkStatus() : SaveWhole();
}

}  // namespace tessera
