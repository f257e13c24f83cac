#include "optim/factored/boxes.h"

#include <algorithm>
#include <cstddef>

namespace tessera {
namespace {

class Cutter {
 public:
  Cutter(absl::Span<const int64_t> sizes, absl::Span<const int64_t> strides)
      : sizes_(sizes), strides_(strides) {
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (sizes[d] != 1) order_.push_back(d);
    }
    std::sort(order_.begin(), order_.end(),
              [&](size_t a, size_t b) { return strides[a] > strides[b]; });
    box_.begins.assign(sizes.size(), 0);
    box_.sizes.assign(sizes.size(), 1);
  }

  // Where cuts cost least that leave at most so many elements together.
  int64_t StepOf(int64_t most) const {
    for (const size_t d : order_) {
      if (strides_[d] <= most) return most / strides_[d] * strides_[d];
    }
    return most;
  }

  // `run` of what the dims from `level` on have in the box so far.
  void Cut(size_t level, Range run) {
    if (run.empty()) return;
    if (level == order_.size()) {
      boxes_.push_back(box_);
      return;
    }
    const size_t d = order_[level];
    const int64_t first = run.begin / strides_[d];
    const int64_t slice = first * strides_[d];
    const int64_t whole = (run.end - slice) / strides_[d];
    box_.begins[d] = first;
    if (run.begin != slice || whole == 0) {
      const int64_t end = std::min(run.end, slice + strides_[d]);
      box_.sizes[d] = 1;
      Cut(level + 1, {run.begin - slice, end - slice});
      return Cut(level, {end, run.end});
    }
    box_.sizes[d] = whole;
    for (size_t inner = level + 1; inner < order_.size(); ++inner) {
      box_.begins[order_[inner]] = 0;
      box_.sizes[order_[inner]] = sizes_[order_[inner]];
    }
    boxes_.push_back(box_);
    Cut(level, {slice + whole * strides_[d], run.end});
  }

  std::vector<Box> Take() { return std::move(boxes_); }

 private:
  absl::Span<const int64_t> sizes_, strides_;
  std::vector<size_t> order_;  // dims, the slowest first
  Box box_;
  std::vector<Box> boxes_;
};

}  // namespace

std::vector<Box> BoxesOf(absl::Span<const int64_t> sizes,
                         absl::Span<const int64_t> strides, Range run,
                         int64_t most) {
  Cutter cutter(sizes, strides);
  const int64_t step = cutter.StepOf(most);
  for (int64_t begin = run.begin; begin < run.end;) {
    const int64_t end = std::min(run.end, (begin / step + 1) * step);
    cutter.Cut(0, {begin, end});
    begin = end;
  }
  return cutter.Take();
}

}  // namespace tessera
