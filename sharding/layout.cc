#include "sharding/layout.h"

namespace tessera {

FlatLayout::FlatLayout(absl::Span<const int64_t> slot_bytes, int world_size)
    : world_size_(world_size) {
  int64_t end = 0;
  for (int64_t bytes : slot_bytes) {
    slots_.push_back({end, end + bytes});
    payload_bytes_ += bytes;
    end = AlignUp(end + bytes);
  }
  shard_bytes_ = AlignUp((end + world_size - 1) / world_size);
}

}  // namespace tessera
