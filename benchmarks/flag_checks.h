// Checks a benchmark's flags in ways that absl does not.
#ifndef BENCHMARKS_FLAG_CHECKS_H_
#define BENCHMARKS_FLAG_CHECKS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace tessera {

// `words` is what absl::ParseCommandLine returned, the program's name first.
inline absl::Status FlagsAlone(const std::vector<char*>& words) {
  if (words.size() <= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("expected flags alone, got '", words[1], "'"));
}

inline absl::Status AtLeast(absl::string_view flag, int64_t least,
                            int64_t value) {
  if (value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": expected ", least, " or more, got ", value));
}

}  // namespace tessera
#endif  // BENCHMARKS_FLAG_CHECKS_H_
