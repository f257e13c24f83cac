#include "base/layout/layout.h"

namespace tessera {

FlatLayout::FlatLayout(absl::Span<const int64_t> slot_numel, int world_size)
    : world_size_(world_size) {
  int64_t end = 0;
  for (int64_t numel : slot_numel) {
    slots_.push_back({end, end + numel});
    payload_numel_ += numel;
    end = AlignUp(end + numel);
  }
  shard_numel_ = AlignUp((end + world_size - 1) / world_size);
}

}  // namespace tessera
