// FlatLayout: where the storages of a unit lie in its flat buffer, and which
// part of each parameter a rank owns. Arithmetic only; knows no torch.
//
//   flat   [ w1 ..| b1 .| w2 ....|....]   P bytes; every storage starts at a
//            slot0  slot1 slot2           multiple of kAlignBytes, gaps are
//            zero
//   shard  flat[r*S, (r+1)*S)             S = P / W, a multiple of kAlignBytes
//
// Why kAlignBytes is four cache lines: a cut between two ranks then falls at a
// multiple of 64 fp32 elements from a parameter's start, so vectorised
// optimizer kernels group the elements alike whatever W is, and the bits do not
// depend on W. The same holds for 8-byte elements (32 of them).
#ifndef SHARDING_LAYOUT_H_
#define SHARDING_LAYOUT_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace tessera {

inline constexpr int64_t kAlignBytes = 256;

// Half-open range of bytes.
struct ByteRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t bytes() const { return end - begin; }
  bool empty() const { return end <= begin; }
};

inline ByteRange Intersect(ByteRange a, ByteRange b) {
  ByteRange r{a.begin > b.begin ? a.begin : b.begin,
              a.end < b.end ? a.end : b.end};
  return r.empty() ? ByteRange{r.begin, r.begin} : r;
}

class FlatLayout {
 public:
  FlatLayout() = default;
  // `slot_bytes`: sizes of the unit's storages, in order. world_size >= 1.
  FlatLayout(absl::Span<const int64_t> slot_bytes, int world_size);

  int world_size() const { return world_size_; }
  int64_t payload_bytes() const { return payload_bytes_; }            // N
  int64_t whole_bytes() const { return shard_bytes_ * world_size_; }  // P
  int64_t shard_bytes() const { return shard_bytes_; }                // S

  int num_slots() const { return static_cast<int>(slots_.size()); }
  ByteRange slot(int i) const { return slots_[i]; }  // in the flat buffer
  ByteRange shard(int rank) const {
    return {rank * shard_bytes_, (rank + 1) * shard_bytes_};
  }

 private:
  std::vector<ByteRange> slots_;
  int64_t payload_bytes_ = 0;
  int64_t shard_bytes_ = 0;
  int world_size_ = 1;
};

inline int64_t AlignUp(int64_t bytes) {
  return (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
}

}  // namespace tessera
#endif  // SHARDING_LAYOUT_H_
