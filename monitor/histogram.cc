#include "monitor/histogram.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace tessera {

Histogram HistogramOf(absl::Span<const double> values, int buckets) {
  Histogram result;
  for (const double value : values) {
    if (!std::isfinite(value)) {
      ++result.not_finite;
      continue;
    }
    result.min = result.count == 0 ? value : std::min(result.min, value);
    result.max = result.count == 0 ? value : std::max(result.max, value);
    ++result.count;
    result.sum += value;
    result.sum_squares += value * value;
  }
  if (result.count == 0) return result;
  // It is halved, so that the width of the widest range is finite, too.
  const double width = (result.max / 2 - result.min / 2) / buckets * 2;
  const int used = width > 0 ? buckets : 1;
  for (int i = 1; i < used; ++i)
    result.limits.push_back(result.min + i * width);
  result.limits.push_back(result.max);
  result.counts.resize(result.limits.size());
  for (const double value : values) {
    if (!std::isfinite(value)) continue;
    const auto bucket =
        std::lower_bound(result.limits.begin(), result.limits.end(), value);
    ++result.counts[static_cast<size_t>(bucket - result.limits.begin())];
  }
  return result;
}

}  // namespace tessera
