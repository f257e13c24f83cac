// SwapSystem: the system calls of a swap file, so that tests can refuse any of
// them or cut it short. No torch.
//
// Threads: all methods may be called from any thread.
#ifndef OFFLOAD_DISK_SWAP_SYSTEM_H_
#define OFFLOAD_DISK_SWAP_SYSTEM_H_

#include <sys/stat.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

class SwapSystem {
 public:
  virtual ~SwapSystem() = default;
  // Returns the real system calls.
  static SwapSystem* Real();

  // The system calls of these names; they return the calls' results, or -errno.
  // Descriptors are closed on exec.
  virtual int OpenFolder(const std::string& path);
  virtual int Open(int folder, const std::string& name, int flags);
  virtual void Close(int fd);
  virtual int Unlink(int folder, const std::string& name);
  // Lists the names in a folder, in no order.
  virtual int List(int folder, std::vector<std::string>* names);
  virtual int Stat(int fd, struct stat* info);
  // Locks a whole file for writing, until its holder ends (fcntl's
  // F_OFD_SETLK). -EAGAIN: another holds the lock.
  virtual int Lock(int fd);
  // Reserves room on the disk; -EOPNOTSUPP where the file system cannot.
  virtual int Fallocate(int fd, int64_t begin, int64_t bytes);
  virtual int Truncate(int fd, int64_t bytes);
  // Returns the bytes that this user may still write to the file system.
  virtual int64_t FsFree(int fd);
  virtual int64_t PRead(int fd, char* to, int64_t bytes, int64_t offset);
  virtual int64_t PWrite(int fd, const char* from, int64_t bytes,
                         int64_t offset);

  // Whether io_uring is tried; without it PRead and PWrite are called.
  virtual bool AllowsUring() { return true; }
  // Receives io_uring's answer to a read or write at `offset`; the returned
  // value replaces it.
  virtual int64_t Completed(bool write, int64_t offset, int64_t result);
};

}  // namespace tessera
#endif  // OFFLOAD_DISK_SWAP_SYSTEM_H_
