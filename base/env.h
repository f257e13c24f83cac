// Environment variables, read with a type.
//
// A variable that is absent or empty gives nullopt; text that does not fit
// gives InvalidArgument that names the variable and the text:
//   "environment variable RANK: expected an integer of 0 to 7, got 'x'"
//
// Threads: safe as long as nobody calls setenv at the same time.
#ifndef BASE_ENV_H_
#define BASE_ENV_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace tessera {

// Bounds are inclusive.
struct Int64Range {
  int64_t min = std::numeric_limits<int64_t>::min();
  int64_t max = std::numeric_limits<int64_t>::max();
};

std::optional<std::string> EnvString(const char* name);
// Reads a decimal integer.
absl::StatusOr<std::optional<int64_t>> EnvInt64(const char* name,
                                                Int64Range range = {});
// Reads any finite number.
absl::StatusOr<std::optional<double>> EnvDouble(const char* name);
// Reads 1, true, yes, on or 0, false, no, off, in any case.
absl::StatusOr<std::optional<bool>> EnvBool(const char* name);
// Reads what absl::ParseDuration does ("1.5s", "200ms", "5m"); a bare number is
// seconds.
absl::StatusOr<std::optional<absl::Duration>> EnvDuration(const char* name);

}  // namespace tessera
#endif  // BASE_ENV_H_
