// The table has the file's identity beside the number: if the program closes a
// descriptor by close() alone, its entry stays, and the number may be a file of
// the user's by then. A child closes only what is still the same file.
//
// It is a table and no list, since in the child other threads are gone and may
// have held any lock, including malloc's. Only async-signal-safe calls are made
// there.
#include "base/system/close_on_fork.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace tessera {
namespace {

// This is the kernel's own limit (fs.nr_open) unless it was raised. Only the
// written pages of the table take memory.
constexpr int kMaxDescriptors = 1 << 20;
std::atomic<uint64_t> g_files[kMaxDescriptors];  // 0: not close-on-fork
std::atomic<int> g_end{0};  // beyond the last descriptor in the table
static_assert(std::atomic<uint64_t>::is_always_lock_free);

pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;

// Returns an identity that is never 0. An inode's number is unique in its file
// system only.
uint64_t IdentityOf(const struct stat& info) {
  return (uint64_t{info.st_dev} << 40 ^ uint64_t{info.st_ino}) | 1ULL << 63;
}

class NoForkMeanwhile {
 public:
  NoForkMeanwhile() { pthread_mutex_lock(&g_mutex); }
  ~NoForkMeanwhile() { pthread_mutex_unlock(&g_mutex); }
};

void BeforeFork() { pthread_mutex_lock(&g_mutex); }
void AfterForkInParent() { pthread_mutex_unlock(&g_mutex); }

void AfterForkInChild() {
  const int saved = errno;
  int null = -1;
  const int end = g_end.load();
  for (int fd = 0; fd < end; ++fd) {
    const uint64_t file = g_files[fd].exchange(0);
    struct stat now;
    if (file == 0 || fstat(fd, &now) != 0 || IdentityOf(now) != file) continue;
    if (null < 0) null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0 || dup3(null, fd, O_CLOEXEC) != fd) close(fd);
  }
  if (null >= 0) close(null);
  errno = saved;
  pthread_mutex_unlock(&g_mutex);
}

void WatchForks() {
  static const int registered =
      pthread_atfork(BeforeFork, AfterForkInParent, AfterForkInChild);
  (void)registered;
}

void Mark(int fd) {
  struct stat info;
  if (fd < 0 || fd >= kMaxDescriptors || fstat(fd, &info) != 0) return;
  g_files[fd] = IdentityOf(info);
  int end = g_end.load();
  while (end <= fd && !g_end.compare_exchange_weak(end, fd + 1)) {
  }
}

// Duplicates a descriptor to a number above 2, with its flags.
int AwayFromStandard(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int moved = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int error = errno;
  close(fd);
  errno = error;
  return moved;
}

}  // namespace

int OpenCloseOnFork(const std::function<int()>& open) {
  WatchForks();
  const NoForkMeanwhile no_fork;
  const int fd = AwayFromStandard(open());
  const int error = errno;
  Mark(fd);
  errno = error;
  return fd;
}

void SetCloseOnFork(int fd) {
  WatchForks();
  Mark(fd);
}

int DuplicateCloseOnFork(int from, int to) {
  WatchForks();
  const NoForkMeanwhile no_fork;
  const int fd = dup3(from, to, O_CLOEXEC);
  const int error = errno;
  Mark(fd);
  errno = error;
  return fd;
}

bool IsCloseOnFork(int fd) {
  return fd >= 0 && fd < kMaxDescriptors && g_files[fd] != 0;
}

int CloseDescriptor(int fd) {
  if (!IsCloseOnFork(fd)) return close(fd);
  const NoForkMeanwhile no_fork;
  g_files[fd] = 0;
  return close(fd);
}

}  // namespace tessera
