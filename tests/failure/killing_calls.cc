// These functions take the place of libc's for the whole program.
#include "tests/failure/killing_calls.h"

#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace tessera {
namespace {

std::atomic<bool> g_counts{false};
std::atomic<int64_t> g_calls{0};
std::atomic<int64_t> g_kill_at{-1};

void Count() {
  if (!g_counts) return;
  if (g_calls++ == g_kill_at) raise(SIGKILL);
}

}  // namespace

void KillAtCall(int64_t at) {
  g_calls = 0;
  g_kill_at = at;
  g_counts = true;
}
int64_t StopCountingCalls() {
  g_counts = false;
  return g_calls;
}

}  // namespace tessera

extern "C" {

ssize_t pwrite(int fd, const void* from, size_t bytes, off_t offset) {
  tessera::Count();
  return syscall(SYS_pwrite64, fd, from, bytes, offset);
}
int fsync(int fd) {
  tessera::Count();
  return static_cast<int>(syscall(SYS_fsync, fd));
}
int renameat(int from_fd, const char* from, int to_fd, const char* to) {
  tessera::Count();
  return static_cast<int>(syscall(SYS_renameat, from_fd, from, to_fd, to));
}
int unlinkat(int fd, const char* name, int flags) {
  tessera::Count();
  return static_cast<int>(syscall(SYS_unlinkat, fd, name, flags));
}
int openat(int fd, const char* name, int flags, ...) {
  tessera::Count();
  va_list arguments;
  va_start(arguments, flags);
  const int mode =
      (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, int) : 0;
  va_end(arguments);
  return static_cast<int>(syscall(SYS_openat, fd, name, flags, mode));
}

}  // extern "C"
