// Program: what the benchmarks share: their flags and their end, measured
// numbers by round, and the clocks that these come from.
#ifndef BENCHMARKS_PROGRAM_H_
#define BENCHMARKS_PROGRAM_H_

#include <time.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera {

// `words` is what absl::ParseCommandLine returned, the program's name first.
inline absl::Status FlagsAlone(const std::vector<char*>& words) {
  if (words.size() <= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("expected flags alone, got '", words[1], "'"));
}

// Reads the flags of a program whose command line has nothing else.
inline absl::Status ReadFlags(int argc, char** argv) {
  return FlagsAlone(absl::ParseCommandLine(argc, argv));
}

// Returns InvalidArgument naming the first flag that is below `least`.
template <typename... T>
absl::Status AtLeast(int64_t least, const absl::Flag<T>&... flags) {
  absl::Status status;
  const auto check = [&](const auto& flag) {
    const int64_t value = absl::GetFlag(flag);
    if (value >= least) return;
    status.Update(absl::InvalidArgumentError(
        absl::StrCat("--", absl::GetFlagReflectionHandle(flag).Name(),
                     ": expected ", least, " or more, got ", value)));
  };
  (check(flags), ...);
  return status;
}

// Returns main's result, after a line that names the error if there is one.
inline int EndOf(const char* program, const absl::Status& status) {
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s: %s\n", program, status.ToString().c_str());
  return 1;
}

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
#endif  // BENCHMARKS_PROGRAM_H_
