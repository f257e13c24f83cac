// Reads small files whole, reads and writes pieces of large ones, and makes
// them durable.
#ifndef BASE_FILE_H_
#define BASE_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

// Returns the bytes of a file, a pipe or an entry of /proc. Errors are
// NotFound, PermissionDenied and so on with the path and the system's words,
// and InvalidArgument if there are more than `max_bytes`.
absl::StatusOr<std::string> ReadWholeFile(const std::string& path,
                                          int64_t max_bytes = 64 << 20);
// Returns the bytes of a regular file or of a link to one. Anything else is
// InvalidArgument: a pipe, whose writer might never come, is not waited for.
absl::StatusOr<std::string> ReadRegularFile(const std::string& path,
                                            int64_t max_bytes);

// Write or read all `bytes` from `offset` on, in as many calls as that takes.
// `what` names the file in an error: that of FileError, or from ReadAt DataLoss
// if the file ends too early.
absl::Status WriteAt(int fd, absl::string_view what, int64_t offset,
                     const char* from, int64_t bytes);
absl::Status ReadAt(int fd, absl::string_view what, int64_t offset, char* to,
                    int64_t bytes);

// Waits until a file's bytes, or a folder's entries, are on the disk.
absl::Status SyncPath(const std::string& path);
// Waits until the folder that contains a file or folder is on the disk.
absl::Status SyncFolderOf(const std::string& path);

// Returns "path: the system's words", with the code that fits `error` (an
// errno).
absl::Status FileError(int error, absl::string_view path);

}  // namespace tessera
#endif  // BASE_FILE_H_
