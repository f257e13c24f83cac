#include "monitor/append_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status.h"

namespace tessera {

absl::StatusOr<AppendFile> AppendFile::Open(std::string path) {
  const int fd =
      ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return FileError(errno, path);
  AppendFile file(std::move(path), fd);
  struct stat about = {};
  if (::fstat(fd, &about) != 0) return FileError(errno, file.path_);
  file.bytes_before_ = about.st_size;
  if (about.st_size > 0) {
    char last = 0;
    TESSERA_RETURN_IF_ERROR(
        ReadAt(fd, file.path_, about.st_size - 1, &last, 1));
    file.torn_ = last != '\n';
  }
  return file;
}

AppendFile::AppendFile(AppendFile&& other) noexcept
    : path_(other.path_),
      fd_(std::exchange(other.fd_, -1)),
      bytes_before_(other.bytes_before_),
      torn_(other.torn_) {}

AppendFile::~AppendFile() {
  if (fd_ >= 0) ::close(fd_);
}

absl::Status AppendFile::Append(absl::string_view bytes) {
  const size_t all = bytes.size();
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      const int error = errno;
      if (bytes.size() < all) TakeBack(all - bytes.size());
      return FileError(error, path_);
    }
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

// Removes a partly written record, which would hide what is written behind it.
// In a pipe it stays.
void AppendFile::TakeBack(size_t bytes) {
  struct stat about = {};
  if (::fstat(fd_, &about) != 0 || !S_ISREG(about.st_mode)) return;
  (void)::ftruncate(fd_, about.st_size - static_cast<off_t>(bytes));
}

absl::Status AppendFile::Sync() {
  // A pipe or a terminal has no disk.
  if (::fdatasync(fd_) != 0 && errno != EINVAL && errno != EROFS) {
    return FileError(errno, path_);
  }
  return absl::OkStatus();
}

absl::Status MakeFolders(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  // An empty path is the current folder.
  if (!path.empty() && error) return FileError(error.value(), path);
  return absl::OkStatus();
}

std::string JoinPath(absl::string_view folder, absl::string_view name) {
  if (folder.empty()) return std::string(name);
  if (name.empty()) return std::string(folder);
  return absl::StrCat(folder, absl::EndsWith(folder, "/") ? "" : "/", name);
}

}  // namespace tessera
