// Small files, read whole.
#ifndef BASE_FILE_H_
#define BASE_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

// The bytes of a file, a pipe or an entry of /proc. Returns NotFound,
// PermissionDenied and so on with the path and the system's words, and
// InvalidArgument if there are more than `max_bytes`.
absl::StatusOr<std::string> ReadWholeFile(const std::string& path,
                                          int64_t max_bytes = 64 << 20);

// "path: the system's words", with the code that fits `error` (an errno).
absl::Status FileError(int error, absl::string_view path);

}  // namespace tessera
#endif  // BASE_FILE_H_
