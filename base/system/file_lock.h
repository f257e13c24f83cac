// Locks whole files; a lock dies with the process that took it, over NFS too
// (fcntl's F_OFD_SETLK), whatever the process has forked. If the process is
// killed within fork(), the lock lives until that child first runs.
#ifndef BASE_SYSTEM_FILE_LOCK_H_
#define BASE_SYSTEM_FILE_LOCK_H_

namespace tessera {

// Locks the file, which is open for reading and writing, until CloseLockedFile.
// Returns 0 or -errno; -EAGAIN or -EACCES says that another process has locked
// it. Does not wait.
int LockFile(int fd);

// Closes a descriptor and releases its lock, if LockFile locked it.
void CloseLockedFile(int fd);

}  // namespace tessera
#endif  // BASE_SYSTEM_FILE_LOCK_H_
