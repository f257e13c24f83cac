#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace tessera {

absl::Status FileError(int error, absl::string_view path) {
  // std::strerror's "No such file or directory" is in the message either way.
  return absl::Status(absl::ErrnoToStatusCode(error),
                      absl::StrCat(path, ": ", std::strerror(error)));
}

absl::StatusOr<std::string> ReadWholeFile(const std::string& path,
                                          int64_t max_bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return FileError(errno, path);
  const auto closer = absl::MakeCleanup([fd] { close(fd); });
  std::string content;
  char block[1 << 14];
  for (;;) {
    const ssize_t got = read(fd, block, sizeof(block));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FileError(errno, path);
    if (got == 0) return content;
    content.append(block, static_cast<size_t>(got));
    if (static_cast<int64_t>(content.size()) > max_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": more than ", max_bytes, " bytes"));
    }
  }
}

}  // namespace tessera
