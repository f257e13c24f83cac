#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace tessera {

absl::Status FileError(int error, absl::string_view path) {
  // std::strerror's "No such file or directory" is in the message either way.
  return absl::Status(absl::ErrnoToStatusCode(error),
                      absl::StrCat(path, ": ", std::strerror(error)));
}

namespace {

absl::StatusOr<std::string> ReadToEnd(int fd, const std::string& path,
                                      int64_t max_bytes) {
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

}  // namespace

absl::StatusOr<std::string> ReadWholeFile(const std::string& path,
                                          int64_t max_bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return FileError(errno, path);
  const auto closer = absl::MakeCleanup([fd] { close(fd); });
  return ReadToEnd(fd, path, max_bytes);
}

absl::StatusOr<std::string> ReadRegularFile(const std::string& path,
                                            int64_t max_bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return FileError(errno, path);
  const auto closer = absl::MakeCleanup([fd] { close(fd); });
  struct stat info;
  if (fstat(fd, &info) != 0) return FileError(errno, path);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": expected a file, got a folder, a pipe or a device"));
  }
  return ReadToEnd(fd, path, max_bytes);
}

absl::Status WriteAt(int fd, absl::string_view what, int64_t offset,
                     const char* from, int64_t bytes) {
  while (bytes > 0) {
    const ssize_t n = pwrite(fd, from, static_cast<size_t>(bytes), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return FileError(n < 0 ? errno : EIO, what);
    from += n;
    bytes -= n;
    offset += n;
  }
  return absl::OkStatus();
}

absl::Status ReadAt(int fd, absl::string_view what, int64_t offset, char* to,
                    int64_t bytes) {
  while (bytes > 0) {
    const ssize_t n = pread(fd, to, static_cast<size_t>(bytes), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return FileError(errno, what);
    if (n == 0) {
      return absl::DataLossError(
          absl::StrCat(what, ": the file ends at byte ", offset, ", expected ",
                       bytes, " more; it was cut off while it was read"));
    }
    to += n;
    offset += n;
    bytes -= n;
  }
  return absl::OkStatus();
}

absl::Status SyncPath(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return FileError(errno, path);
  const auto closer = absl::MakeCleanup([fd] { close(fd); });
  return fsync(fd) == 0 ? absl::OkStatus() : FileError(errno, path);
}

absl::Status SyncFolderOf(const std::string& path) {
  return SyncPath(std::filesystem::absolute(path).parent_path().string());
}

}  // namespace tessera
