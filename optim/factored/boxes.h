// Boxes: divides a run of a tensor's memory, which may begin and end anywhere,
// into a few sub-tensors:
//
//   . . . x x     head
//   x x x x x     the middle, at most once for each dim
//   x x x x x
//   x x . . .     tail
#ifndef OPTIM_FACTORED_BOXES_H_
#define OPTIM_FACTORED_BOXES_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "base/layout/layout.h"

namespace tessera {

struct Box {
  std::vector<int64_t> begins, sizes;  // by dim of the tensor
};

// Returns the boxes of a run, which is counted from the tensor's first element
// in memory. Boxes have at most `most` elements each. REQUIRES: the tensor is
// dense and does not overlap itself, in whatever order of dims; it is not
// empty; most >= 1.
std::vector<Box> BoxesOf(absl::Span<const int64_t> sizes,
                         absl::Span<const int64_t> strides, Range run,
                         int64_t most);

}  // namespace tessera
#endif  // OPTIM_FACTORED_BOXES_H_
