// Slices of a tensor, one for each rank.
#ifndef COMM_REDUCE_SLICES_H_
#define COMM_REDUCE_SLICES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tessera {

struct Slice {
  int64_t begin = 0;
  int64_t numel = 0;
};

// One slice for each rank: of `whole_numel` elements in all, as even as slices
// of equal size go; the last ones may be shorter, or empty.
inline std::vector<Slice> Slices(int64_t whole_numel, int world_size) {
  const int64_t each = (whole_numel + world_size - 1) / world_size;
  std::vector<Slice> slices(world_size);
  for (int r = 0; r < world_size; ++r) {
    slices[r].begin = std::min(r * each, whole_numel);
    slices[r].numel = std::min(each, whole_numel - slices[r].begin);
  }
  return slices;
}

}  // namespace tessera
#endif  // COMM_REDUCE_SLICES_H_
