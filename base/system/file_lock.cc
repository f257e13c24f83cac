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

}  // namespace

int LockFile(int fd) {
  // The lock belongs to the open file, so a child that has it would hold it,
  // too.
  SetCloseOnFork(fd);
  return SetLock(fd, F_WRLCK);
}

void CloseLockedFile(int fd) {
  // Without unlocking, others that got the same open file in other ways than by
  // fork() would hold it, too.
  if (IsCloseOnFork(fd)) SetLock(fd, F_UNLCK);
  CloseDescriptor(fd);
}

}  // namespace tessera
