#include "offload/disk/swap_system.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

#include "base/system/file_lock.h"

namespace tessera {
namespace {

constexpr mode_t kOwnersOnly = 0600;

template <class T>
T OrError(T result) {
  return result < 0 ? -errno : result;
}

// The limit of the size of files (ulimit -f), beyond which a file that grows
// ends the process by SIGXFSZ, without a word.
bool IsBeyondLimit(int64_t bytes) {
  rlimit limit = {};
  return getrlimit(RLIMIT_FSIZE, &limit) == 0 &&
         limit.rlim_cur != RLIM_INFINITY &&
         static_cast<uint64_t>(bytes) > limit.rlim_cur;
}

}  // namespace

SwapSystem* SwapSystem::Real() {
  static auto* const real = new SwapSystem;
  return real;
}

int SwapSystem::OpenFolder(const std::string& path) {
  return OrError(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

int SwapSystem::Open(int folder, const std::string& name, int flags) {
  return OrError(openat(folder, name.c_str(), flags | O_CLOEXEC, kOwnersOnly));
}

void SwapSystem::Close(int fd) { CloseLockedFile(fd); }

int SwapSystem::Unlink(int folder, const std::string& name) {
  return OrError(unlinkat(folder, name.c_str(), 0));
}

int SwapSystem::List(int folder, std::vector<std::string>* names) {
  names->clear();
  // Uses a descriptor of its own, since reading moves a descriptor's position.
  const int fd = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* const stream = fd < 0 ? nullptr : fdopendir(fd);
  if (stream == nullptr) {
    const int error = errno;
    if (fd >= 0) close(fd);
    return -error;
  }
  errno = 0;
  while (const dirent* entry = readdir(stream)) {
    names->push_back(entry->d_name);
    errno = 0;
  }
  const int error = errno;
  closedir(stream);
  return -error;
}

int SwapSystem::Stat(int fd, struct stat* info) {
  return OrError(fstat(fd, info));
}

int SwapSystem::Lock(int fd) { return LockFile(fd); }

int SwapSystem::Fallocate(int fd, int64_t begin, int64_t bytes) {
  if (IsBeyondLimit(begin + bytes)) return -EFBIG;
  return OrError(fallocate(fd, 0, begin, bytes));
}

int SwapSystem::Truncate(int fd, int64_t bytes) {
  if (IsBeyondLimit(bytes)) return -EFBIG;
  return OrError(ftruncate(fd, bytes));
}

int64_t SwapSystem::FsFree(int fd) {
  struct statvfs info = {};
  if (fstatvfs(fd, &info) != 0) return -errno;
  return static_cast<int64_t>(info.f_bavail) *
         static_cast<int64_t>(info.f_frsize);
}

int64_t SwapSystem::PRead(int fd, char* to, int64_t bytes, int64_t offset) {
  return OrError(pread(fd, to, static_cast<size_t>(bytes), offset));
}

int64_t SwapSystem::PWrite(int fd, const char* from, int64_t bytes,
                           int64_t offset) {
  return OrError(pwrite(fd, from, static_cast<size_t>(bytes), offset));
}

int64_t SwapSystem::Completed(bool /*write*/, int64_t /*offset*/,
                              int64_t result) {
  return result;
}

}  // namespace tessera
