// Makes the histogram of some values (monitor/step_metrics.h).
#ifndef MONITOR_HISTOGRAM_H_
#define MONITOR_HISTOGRAM_H_

#include "absl/types/span.h"
#include "monitor/step_metrics.h"

namespace tessera {

// Makes `buckets` buckets of equal width, or one if all values are equal.
Histogram HistogramOf(absl::Span<const double> values, int buckets = 64);

}  // namespace tessera
#endif  // MONITOR_HISTOGRAM_H_
