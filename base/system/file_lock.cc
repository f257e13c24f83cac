#include "base/system/file_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

#include "base/system/close_on_fork.h"

namespace tessera {
namespace {

int SetLock(int fd, short type) {
  struct flock whole = {};
  whole.l_type = type;
  whole.l_whence = SEEK_SET;
  return fcntl(fd, F_OFD_SETLK, &whole) < 0 ? -errno : 0;
}

// The lock belongs to the open file, so a child that has it would hold it, too.
// One that was forked since the file was opened has it by now: `fd` is made to
// stand for a file that is opened anew. Without /proc only later children do
// not have it.
void KeepFromChildren(int fd) {
  if (IsCloseOnFork(fd)) return;
  char path[32];
  snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  const int own =
      OpenCloseOnFork([&] { return open(path, O_RDWR | O_CLOEXEC); });
  if (own < 0 || DuplicateCloseOnFork(own, fd) != fd) SetCloseOnFork(fd);
  if (own >= 0) CloseDescriptor(own);
}

}  // namespace

int LockFile(int fd) {
  KeepFromChildren(fd);
  return SetLock(fd, F_WRLCK);
}

void CloseLockedFile(int fd) {
  // Without unlocking, others that got the same open file in other ways than by
  // fork() would hold it, too.
  if (IsCloseOnFork(fd)) SetLock(fd, F_UNLCK);
  CloseDescriptor(fd);
}

}  // namespace tessera
