// Histogram shows how values are distributed, in TensorBoard's form.
//
// Values that lie on several ranks, or in pieces, make one histogram together:
//
//   HistogramRange range;
//   range.Add(values);                     // each piece
//   range.Merge(theirs);                   // each rank's
//   Histogram histogram = EmptyHistogram(range);
//   CountInto(values, &histogram);         // each piece; then counts are added
#ifndef MONITOR_HISTOGRAM_H_
#define MONITOR_HISTOGRAM_H_

#include "absl/types/span.h"
#include "monitor/step_metrics.h"

namespace tessera {

// What of a histogram is known before its buckets.
struct HistogramRange {
  double min = 0, max = 0, sum = 0, sum_squares = 0;
  int64_t count = 0, not_finite = 0;

  // Adds values, of which those that are not finite only count.
  void Add(absl::Span<const double> values);
  // Adds the values of `other`. Sums depend on the order of the calls in their
  // last bits, the rest does not.
  void Merge(const HistogramRange& other);
};

inline constexpr int kHistogramBuckets = 64;

// Returns a histogram of that range with counts of 0, in `buckets` buckets of
// equal width, or in one if all values are equal.
Histogram EmptyHistogram(const HistogramRange& range,
                         int buckets = kHistogramBuckets);
// Counts the finite ones of `values`, which must be within the range.
void CountInto(absl::Span<const double> values, Histogram* histogram);

// Makes a histogram of values that are all here.
Histogram HistogramOf(absl::Span<const double> values,
                      int buckets = kHistogramBuckets);

}  // namespace tessera
#endif  // MONITOR_HISTOGRAM_H_
