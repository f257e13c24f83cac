#include "monitor/histogram.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace tessera {

void HistogramRange::Add(absl::Span<const double> values) {
  for (const double value : values) {
    if (!std::isfinite(value)) {
      ++not_finite;
      continue;
    }
    min = count == 0 ? value : std::min(min, value);
    max = count == 0 ? value : std::max(max, value);
    ++count;
    sum += value;
    sum_squares += value * value;
  }
}

void HistogramRange::Merge(const HistogramRange& other) {
  not_finite += other.not_finite;
  if (other.count == 0) return;
  min = count == 0 ? other.min : std::min(min, other.min);
  max = count == 0 ? other.max : std::max(max, other.max);
  count += other.count;
  sum += other.sum;
  sum_squares += other.sum_squares;
}

Histogram EmptyHistogram(const HistogramRange& range, int buckets) {
  Histogram result;
  result.min = range.min;
  result.max = range.max;
  result.sum = range.sum;
  result.sum_squares = range.sum_squares;
  result.count = range.count;
  result.not_finite = range.not_finite;
  if (range.count == 0) return result;
  // It is halved, so that the width of the widest range is finite, too.
  const double width = (range.max / 2 - range.min / 2) / buckets * 2;
  const int used = width > 0 ? buckets : 1;
  for (int i = 1; i < used; ++i)
    result.limits.push_back(result.min + i * width);
  result.limits.push_back(result.max);
  result.counts.resize(result.limits.size());
  return result;
}

// A division finds the bucket but for roundings, which the limits decide.
void CountInto(absl::Span<const double> values, Histogram* histogram) {
  const std::vector<double>& limits = histogram->limits;
  if (limits.empty()) return;
  const size_t last = limits.size() - 1;
  const double half_min = histogram->min / 2;
  const double scale =
      static_cast<double>(limits.size()) / (histogram->max / 2 - half_min);
  for (const double value : values) {
    if (!std::isfinite(value)) continue;
    const double place = (value / 2 - half_min) * scale;
    size_t bucket = 0;
    if (place > 0) {  // false for NaN, where all values are equal
      bucket =
          place < static_cast<double>(last) ? static_cast<size_t>(place) : last;
    }
    while (bucket > 0 && value <= limits[bucket - 1]) --bucket;
    while (bucket < last && value > limits[bucket]) ++bucket;
    ++histogram->counts[bucket];
  }
}

Histogram HistogramOf(absl::Span<const double> values, int buckets) {
  HistogramRange range;
  range.Add(values);
  Histogram result = EmptyHistogram(range, buckets);
  CountInto(values, &result);
  return result;
}

}  // namespace tessera
