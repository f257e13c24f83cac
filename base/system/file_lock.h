// Locks of whole files that die with the process that took them, over NFS too
// (fcntl's F_OFD_SETLK), whatever it has forked.
#ifndef BASE_SYSTEM_FILE_LOCK_H_
#define BASE_SYSTEM_FILE_LOCK_H_

namespace tessera {

// Locks the file for writing until CloseLockedFile. 0, or -errno; -EAGAIN or
// -EACCES: another has locked it. Does not wait.
int LockFile(int fd);

// Closes a descriptor, whether LockFile locked it or not, and lets the lock go.
void CloseLockedFile(int fd);

}  // namespace tessera
#endif  // BASE_SYSTEM_FILE_LOCK_H_
