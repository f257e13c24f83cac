// Program: what the benchmarks' main functions share: their flags and their
// end.
#ifndef BENCHMARKS_PROGRAM_H_
#define BENCHMARKS_PROGRAM_H_

#include <cstdint>
#include <cstdio>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

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

}  // namespace tessera
#endif  // BENCHMARKS_PROGRAM_H_
