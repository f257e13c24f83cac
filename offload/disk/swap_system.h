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
  // The system's own.
  static SwapSystem* Real();

  // As the system calls of these names: what they return, or -errno.
  // Descriptors are closed on exec.
  virtual int OpenFolder(const std::string& path);
  virtual int Open(int folder, const std::string& name, int flags);
  virtual void Close(int fd);
  virtual int Unlink(int folder, const std::string& name);
  // Names in a folder, in no order.
  virtual int List(int folder, std::vector<std::string>* names);
  virtual int Stat(int fd, struct stat* info);
  // A lock of a whole file for writing that dies with its holder (fcntl's
  // F_OFD_SETLK). -EAGAIN: another holds it.
  virtual int Lock(int fd);
  // Room on the disk; -EOPNOTSUPP where the file system promises none.
  virtual int Fallocate(int fd, int64_t begin, int64_t bytes);
  virtual int Truncate(int fd, int64_t bytes);
  // Bytes that this user may still write to the file system.
  virtual int64_t FsFree(int fd);
  virtual int64_t PRead(int fd, char* to, int64_t bytes, int64_t offset);
  virtual int64_t PWrite(int fd, const char* from, int64_t bytes,
                         int64_t offset);

  // io_uring is tried; without it PRead and PWrite are called.
  virtual bool AllowsUring() { return true; }
  // What io_uring answered to a read or write at `offset`: what is returned
  // counts instead.
  virtual int64_t Completed(bool write, int64_t offset, int64_t result);
};

}  // namespace tessera
#endif  // OFFLOAD_DISK_SWAP_SYSTEM_H_
