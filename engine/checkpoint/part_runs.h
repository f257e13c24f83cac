// Where the elements of a part of a parameter lie in the whole, as a checkpoint
// has it: it knows nothing of parts.
//
//   whole [2, 6], cut along 1     . . . 3 4 5      part 1 of 2 has two runs,
//                                 . . . 9 10 11    [3, 6) and [9, 12)
#ifndef ENGINE_CHECKPOINT_PART_RUNS_H_
#define ENGINE_CHECKPOINT_PART_RUNS_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/layout/layout.h"
#include "sharding/partition/named_parameter.h"

namespace tessera {

// A run of elements, which begins at `part` in the part and at `whole` in the
// whole.
struct PartRun {
  int64_t part = 0, whole = 0, numel = 0;
};

// Returns the runs of `elements` of a part, in order; `per`: elements of a
// number. Without a part the whole is one run.
inline std::vector<PartRun> RunsOf(const std::optional<PartOfWhole>& part,
                                   Range elements, int64_t per) {
  if (part.has_value() && part->stands_in()) return {};
  if (!part.has_value() || part->of_pipeline()) {
    return {{elements.begin, elements.begin, elements.numel()}};
  }
  const PartOfWhole split = part->Split();
  int64_t inner = per;
  for (size_t d = static_cast<size_t>(split.dim) + 1; d < split.sizes.size();
       ++d) {
    inner *= split.sizes[d];
  }
  const int64_t stride = inner * split.sizes[static_cast<size_t>(split.dim)];
  const int64_t length = stride / split.parts;
  std::vector<PartRun> runs;
  for (int64_t begin = elements.begin; begin < elements.end;) {
    const int64_t number = begin / length;
    const int64_t end = std::min(elements.end, (number + 1) * length);
    runs.push_back(
        {begin,
         number * stride + part->index * length + (begin - number * length),
         end - begin});
    begin = end;
  }
  return runs;
}

}  // namespace tessera
#endif  // ENGINE_CHECKPOINT_PART_RUNS_H_
