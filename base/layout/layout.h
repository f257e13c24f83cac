// FlatLayout says where storages lie in the flat buffer of a flat parameter,
// and which slice of the buffer a rank owns. It is arithmetic only and knows no
// torch.
//
// Sizes are counted in elements, since a flat buffer exists in several dtypes:
// working copy, master, gradient. A complex number counts as two real elements.
//
//   flat   [ w1 ..| b1 .| w2 ....|....]   P elements; every storage starts at a
//            slot0  slot1 slot2           multiple of kAlignElements, gaps are
//                                         zero
//   shard  flat[r*S, (r+1)*S)             S = P / W, a multiple of it too
//
// So a cut between two ranks falls at a multiple of 64 elements from a
// storage's start: vectorised optimizer kernels group the elements the same way
// for every W, blocks of the gradient norm are never cut, and the bits do not
// depend on W. In bytes the alignment is two cache lines or more in every dtype
// that trains.
#ifndef BASE_LAYOUT_LAYOUT_H_
#define BASE_LAYOUT_LAYOUT_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace tessera {

inline constexpr int64_t kAlignElements = 64;

// A half-open range of elements.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t numel() const { return end - begin; }
  bool empty() const { return end <= begin; }
  bool operator==(const Range& other) const {
    return begin == other.begin && end == other.end;
  }
};

inline Range Intersect(Range a, Range b) {
  Range r{a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
  return r.empty() ? Range{r.begin, r.begin} : r;
}

class FlatLayout {
 public:
  FlatLayout() = default;
  // `slot_numel` holds the sizes of the storages, in order. REQUIRES:
  // world_size >= 1.
  FlatLayout(absl::Span<const int64_t> slot_numel, int world_size);

  int world_size() const { return world_size_; }
  int64_t payload_numel() const { return payload_numel_; }            // N
  int64_t whole_numel() const { return shard_numel_ * world_size_; }  // P
  int64_t shard_numel() const { return shard_numel_; }                // S

  int num_slots() const { return static_cast<int>(slots_.size()); }
  Range slot(int i) const { return slots_[i]; }  // in the flat buffer
  Range shard(int rank) const {
    return {rank * shard_numel_, (rank + 1) * shard_numel_};
  }

 private:
  std::vector<Range> slots_;
  int64_t payload_numel_ = 0;
  int64_t shard_numel_ = 0;
  int world_size_ = 1;
};

inline int64_t AlignUp(int64_t numel) {
  return (numel + kAlignElements - 1) / kAlignElements * kAlignElements;
}

}  // namespace tessera
#endif  // BASE_LAYOUT_LAYOUT_H_
