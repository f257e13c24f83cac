// Figures: measured numbers, by round, and the clocks that they come from.
#ifndef BENCHMARKS_FIGURES_H_
#define BENCHMARKS_FIGURES_H_

#include <time.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status.h"

namespace tessera {

// Returns the mean of the two in the middle, which are one if their number is
// odd. REQUIRES: there is one at least.
inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

// Returns numerators[i] / denominators[i], for rounds i.
inline std::vector<double> Ratios(const std::vector<double>& numerators,
                                  const std::vector<double>& denominators) {
  std::vector<double> ratios;
  for (size_t i = 0; i < numerators.size(); ++i) {
    ratios.push_back(numerators[i] / denominators[i]);
  }
  return ratios;
}

inline double SecondsOf(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) +
         1e-9 * static_cast<double>(time.tv_nsec);
}

// Times are those of the wall clock and those of all the process's threads on
// processors. On a shared machine the second means more; the first includes
// waits, and counts what threads do at the same time once.
struct Times {
  double wall = 0, cpu = 0;  // seconds

  static Times Now() {
    return {SecondsOf(CLOCK_MONOTONIC), SecondsOf(CLOCK_PROCESS_CPUTIME_ID)};
  }
  Times operator-(const Times& begin) const {
    return {wall - begin.wall, cpu - begin.cpu};
  }
};

// Returns the times that body() takes; it returns a Status.
template <typename Body>
absl::StatusOr<Times> TimesOf(const Body& body) {
  const Times begin = Times::Now();
  TESSERA_RETURN_IF_ERROR(body());
  return Times::Now() - begin;
}

}  // namespace tessera
#endif  // BENCHMARKS_FIGURES_H_
