// These functions take the place of libc's for the whole program.
#include "tests/failure/killing_calls.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>

namespace tessera {
namespace {

std::atomic<bool> g_counts{false};
std::atomic<int64_t> g_calls{0};
int64_t g_at = -1;
int g_error = kKill;
char g_under[PATH_MAX];

bool LiesUnder(const char* path) {
  return strncmp(path, g_under, strlen(g_under)) == 0;
}
bool LiesUnder(int fd) {
  char link[64], path[PATH_MAX];
  if (fd == AT_FDCWD) {
    snprintf(link, sizeof(link), "/proc/self/cwd");
  } else {
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  }
  const long n = syscall(SYS_readlink, link, path, sizeof(path) - 1);
  if (n < 0) return false;
  path[n] = '\0';
  return LiesUnder(path);
}
bool LiesUnder(int folder, const char* name) {
  int fd = 0;
  if (sscanf(name, "/proc/self/fd/%d", &fd) == 1) return LiesUnder(fd);
  return name[0] == '/' ? LiesUnder(name) : LiesUnder(folder);
}

// What the call fails with, or 0.
template <class... Place>
int FaultOf(Place... place) {
  if (!g_counts) return 0;
  const int before = errno;
  const bool counts = LiesUnder(place...);
  errno = before;
  if (!counts || g_calls++ != g_at) return 0;
  if (g_error == kKill) raise(SIGKILL);
  return g_error;
}

int Fail(int error) {
  errno = error;
  return -1;
}

}  // namespace

void CountCalls(const CallFault& fault) {
  g_calls = 0;
  g_at = fault.at;
  g_error = fault.error;
  snprintf(g_under, sizeof(g_under), "%s", fault.under.c_str());
  g_counts = true;
}
int64_t StopCountingCalls() {
  g_counts = false;
  return g_calls;
}

}  // namespace tessera

extern "C" {

using tessera::Fail;
using tessera::FaultOf;

ssize_t pwrite(int fd, const void* from, size_t bytes, off_t offset) {
  const int fault = FaultOf(fd);
  if (fault > 0) return Fail(fault);
  if (fault == tessera::kShortCall && bytes > 1) bytes = 1;
  return syscall(SYS_pwrite64, fd, from, bytes, offset);
}
ssize_t pread(int fd, void* to, size_t bytes, off_t offset) {
  const int fault = FaultOf(fd);
  if (fault > 0) return Fail(fault);
  if (fault == tessera::kShortCall && bytes > 1) bytes = 1;
  return syscall(SYS_pread64, fd, to, bytes, offset);
}
int fsync(int fd) {
  const int fault = FaultOf(fd);
  if (fault > 0) return Fail(fault);
  return static_cast<int>(syscall(SYS_fsync, fd));
}
int fstat(int fd, struct stat* info) {
  const int fault = FaultOf(fd);
  if (fault > 0) return Fail(fault);
  return static_cast<int>(syscall(SYS_fstat, fd, info));
}
int renameat(int from_fd, const char* from, int to_fd, const char* to) {
  const int fault = FaultOf(from_fd, from);
  if (fault > 0) return Fail(fault);
  return static_cast<int>(syscall(SYS_renameat, from_fd, from, to_fd, to));
}
int unlinkat(int fd, const char* name, int flags) {
  const int fault = FaultOf(fd, name);
  if (fault > 0) return Fail(fault);
  return static_cast<int>(syscall(SYS_unlinkat, fd, name, flags));
}
int mkdirat(int fd, const char* name, mode_t mode) {
  const int fault = FaultOf(fd, name);
  if (fault > 0) return Fail(fault);
  return static_cast<int>(syscall(SYS_mkdirat, fd, name, mode));
}
int fcntl(int fd, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  const int fault = command == F_OFD_SETLK ? FaultOf(fd) : 0;
  if (fault > 0) return Fail(fault);
  return static_cast<int>(syscall(SYS_fcntl, fd, command, argument));
}
int openat(int fd, const char* name, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const int mode =
      (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, int) : 0;
  va_end(arguments);
  const int fault = FaultOf(fd, name);
  if (fault > 0) return Fail(fault);
  return static_cast<int>(syscall(SYS_openat, fd, name, flags, mode));
}
int open(const char* name, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const int mode =
      (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, int) : 0;
  va_end(arguments);
  return openat(AT_FDCWD, name, flags, mode);
}

}  // extern "C"
