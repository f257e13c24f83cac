// IntervalSet is a set of moments, as sorted intervals that do not touch.
#ifndef REPORT_INTERVALS_H_
#define REPORT_INTERVALS_H_

#include <algorithm>
#include <utility>
#include <vector>

namespace tessera {

struct Interval {
  double begin = 0, end = 0;
};

inline double Overlap(Interval a, Interval b) {
  return std::max(0.0, std::min(a.end, b.end) - std::max(a.begin, b.begin));
}

class IntervalSet {
 public:
  // Adds intervals in any order, until Close.
  void Add(Interval interval) {
    if (interval.end > interval.begin) parts_.push_back(interval);
  }
  void Close() {
    std::sort(
        parts_.begin(), parts_.end(),
        [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
    std::vector<Interval> merged;
    for (const Interval& part : parts_) {
      if (!merged.empty() && part.begin <= merged.back().end) {
        merged.back().end = std::max(merged.back().end, part.end);
      } else {
        merged.push_back(part);
      }
    }
    parts_ = std::move(merged);
  }

  double length() const {
    double sum = 0;
    for (const Interval& part : parts_) sum += part.end - part.begin;
    return sum;
  }
  // Returns the length of what both sets hold.
  double LengthWith(const IntervalSet& other) const {
    double sum = 0;
    size_t j = 0;
    for (const Interval& part : parts_) {
      while (j < other.parts_.size() && other.parts_[j].end <= part.begin) ++j;
      for (size_t k = j;
           k < other.parts_.size() && other.parts_[k].begin < part.end; ++k) {
        sum += Overlap(part, other.parts_[k]);
      }
    }
    return sum;
  }

 private:
  std::vector<Interval> parts_;
};

}  // namespace tessera
#endif  // REPORT_INTERVALS_H_
