// Median: the middle of some measured numbers.
#ifndef BENCHMARKS_MEDIAN_H_
#define BENCHMARKS_MEDIAN_H_

#include <algorithm>
#include <cstddef>
#include <vector>

namespace tessera {

// Returns the mean of the two in the middle, which are one if their number is
// odd. REQUIRES: there is one at least.
inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

}  // namespace tessera
#endif  // BENCHMARKS_MEDIAN_H_
