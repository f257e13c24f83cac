// Environment variables, read with a type.
//
// A variable that is absent or empty gives nullopt; text that does not fit
// gives InvalidArgument that names the variable and the text.
//
// Threads: safe as long as nobody calls setenv at the same time.
#ifndef BASE_ENV_H_
#define BASE_ENV_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace tessera {

std::optional<std::string> EnvString(const char* name);
// Reads 1, true, yes, on or 0, false, no, off, in any case.
absl::StatusOr<std::optional<bool>> EnvBool(const char* name);

}  // namespace tessera
#endif  // BASE_ENV_H_
