#include "data/mapped_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "data/truncated_files.h"

namespace tessera {

absl::StatusOr<MappedFile> MappedFile::Open(const std::string& path,
                                            int64_t min_bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return FileError(errno, path);
  const auto closer = absl::MakeCleanup([fd] { close(fd); });
  struct stat info;
  if (fstat(fd, &info) != 0) return FileError(errno, path);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": not a regular file"));
  }
  const int64_t wanted_bytes = std::max<int64_t>(min_bytes, 1);
  if (info.st_size < wanted_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": expected at least ", wanted_bytes,
                     " bytes, the file has ", info.st_size));
  }
  const size_t size = static_cast<size_t>(info.st_size);
  void* data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  if (data == MAP_FAILED) return FileError(errno, path);
  NameIfTruncated(data, size, path);
  return MappedFile(path, {static_cast<const uint8_t*>(data), size});
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this == &other) return *this;
  Unmap();
  path_ = std::move(other.path_);
  bytes_ = std::exchange(other.bytes_, {});
  return *this;
}

MappedFile::~MappedFile() { Unmap(); }

void MappedFile::Unmap() {
  if (bytes_.empty()) return;
  Forget(bytes_.data());
  munmap(const_cast<uint8_t*>(bytes_.data()), bytes_.size());
  bytes_ = {};
}

}  // namespace tessera
