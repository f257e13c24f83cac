// Histogram shows how values are distributed, in TensorBoard's form.
#ifndef MONITOR_HISTOGRAM_H_
#define MONITOR_HISTOGRAM_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace tessera {

struct Histogram {
  double min = 0, max = 0, sum = 0, sum_squares = 0;
  int64_t count = 0;       // of finite values
  int64_t not_finite = 0;  // left out of all other fields
  // Bucket i counts the values in (limits[i - 1], limits[i]]; the last limit is
  // `max`. Empty without values.
  std::vector<double> limits;
  std::vector<int64_t> counts;
};

// Makes `buckets` buckets of equal width, or one if all values are equal.
Histogram HistogramOf(absl::Span<const double> values, int buckets = 64);

}  // namespace tessera
#endif  // MONITOR_HISTOGRAM_H_
