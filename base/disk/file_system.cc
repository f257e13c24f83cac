#include "base/disk/file_system.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "base/disk/disk_ring.h"
#include "base/system/file_lock.h"

namespace tessera {
namespace {

constexpr mode_t kFolderMode = 0777;  // less the umask
constexpr mode_t kOwnersOnly = 0600;

template <class T>
T OrError(T result) {
  return result < 0 ? -errno : result;
}

// Growing a file beyond RLIMIT_FSIZE raises SIGXFSZ in its thread, which ends a
// process without a message. While one of these lives the signal is blocked,
// and a pending one is consumed, so that only the call's error is left.
class NoSizeSignal {
 public:
  NoSizeSignal() {
    sigemptyset(&only_);
    sigaddset(&only_, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &only_, &before_);
  }
  ~NoSizeSignal() {
    const timespec at_once = {};
    // If the signal was blocked before, a pending one may be another's.
    if (raised_ && sigismember(&before_, SIGXFSZ) == 0) {
      (void)sigtimedwait(&only_, nullptr, &at_once);
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  // Makes a system call, and returns its result or -errno.
  template <class Call>
  auto Make(const Call& call) -> decltype(call()) {
    const auto result = OrError(call());
    raised_ = result == -EFBIG;
    return result;
  }

 private:
  sigset_t only_, before_;
  bool raised_ = false;
};

}  // namespace

FileSystem* FileSystem::Real() {
  static auto* const real = new FileSystem;
  return real;
}

FileSystem* FileSystem::Private() {
  static auto* const real = new FileSystem(kOwnersOnly);
  return real;
}

int FileSystem::Open(int folder, const std::string& name, int flags) {
  return OrError(openat(folder, name.c_str(), flags | O_CLOEXEC, file_mode_));
}

int FileSystem::Reopen(int fd, int flags) {
  const std::string path = absl::StrCat("/proc/self/fd/", fd);
  return OrError(open(path.c_str(), flags | O_CLOEXEC));
}

void FileSystem::Close(int fd) { CloseLockedFile(fd); }

int64_t FileSystem::Write(int fd, const char* from, int64_t bytes,
                          int64_t offset) {
  return NoSizeSignal().Make(
      [&] { return pwrite(fd, from, static_cast<size_t>(bytes), offset); });
}

int64_t FileSystem::Read(int fd, char* to, int64_t bytes, int64_t offset) {
  return OrError(pread(fd, to, static_cast<size_t>(bytes), offset));
}

int FileSystem::Sync(int fd) { return OrError(fsync(fd)); }

int FileSystem::Allocate(int fd, int64_t begin, int64_t bytes) {
  return NoSizeSignal().Make([&] { return fallocate(fd, 0, begin, bytes); });
}

int FileSystem::Truncate(int fd, int64_t bytes) {
  return NoSizeSignal().Make([&] { return ftruncate(fd, bytes); });
}

void FileSystem::StartSync(int fd, int64_t begin, int64_t bytes) {
  // It does not wait, so it does not consume a disk error that Sync should
  // return.
  (void)sync_file_range(fd, begin, bytes, SYNC_FILE_RANGE_WRITE);
}

int FileSystem::Stat(int fd, struct stat* info) {
  return OrError(fstat(fd, info));
}

int FileSystem::Rename(int folder, const std::string& from,
                       const std::string& to) {
  return OrError(renameat(folder, from.c_str(), folder, to.c_str()));
}

int FileSystem::Remove(int folder, const std::string& name) {
  return OrError(unlinkat(folder, name.c_str(), 0));
}

int FileSystem::MakeFolder(int folder, const std::string& name) {
  return OrError(mkdirat(folder, name.c_str(), kFolderMode));
}

int FileSystem::RemoveFolder(int folder, const std::string& name) {
  return OrError(unlinkat(folder, name.c_str(), AT_REMOVEDIR));
}

int FileSystem::List(int folder, std::vector<std::string>* names) {
  names->clear();
  // It opens a descriptor of its own, since reading moves the position.
  const int fd = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* const stream = fd < 0 ? nullptr : fdopendir(fd);
  if (stream == nullptr) {
    const int error = errno;
    if (fd >= 0) close(fd);
    return -error;
  }
  errno = 0;
  while (const dirent* entry = readdir(stream)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names->push_back(name);
    errno = 0;
  }
  const int error = errno;
  closedir(stream);
  return -error;
}

int64_t FileSystem::FreeBytes(int folder) {
  struct statvfs info = {};
  if (fstatvfs(folder, &info) < 0) return -errno;
  return static_cast<int64_t>(info.f_bavail) *
         static_cast<int64_t>(info.f_frsize);
}

int FileSystem::Lock(int fd) { return LockFile(fd); }

std::unique_ptr<DiskRing> FileSystem::MakeRing(unsigned depth) {
  return DiskRing::Create(depth);
}

int64_t FileSystem::Completed(bool /*write*/, int64_t /*offset*/,
                              int64_t result) {
  return result;
}

}  // namespace tessera
