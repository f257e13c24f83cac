// FileSystem has the system calls by which checkpoints and swap files reach a
// disk and come back. All of them go through it, so that tests can refuse any
// one of them, cut it short, or record their order. No torch.
//
// Threads: all methods may be called from any thread.
#ifndef BASE_DISK_FILE_SYSTEM_H_
#define BASE_DISK_FILE_SYSTEM_H_

#include <errno.h>
#include <sys/stat.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

class DiskRing;  // base/disk/disk_ring.h

class FileSystem {
 public:
  // `file_mode`: of the files that it makes, less the umask.
  explicit FileSystem(mode_t file_mode = 0666) : file_mode_(file_mode) {}
  virtual ~FileSystem() = default;
  // Return those that call the system; the files that Private makes are their
  // owner's alone.
  static FileSystem* Real();
  static FileSystem* Private();

  // These do what the system calls of these names do, relative to the
  // descriptor of a folder where they take one, and return the call's result or
  // -errno. Descriptors are closed on exec.
  virtual int Open(int folder, const std::string& name, int flags);
  // Opens what a descriptor of O_PATH stands for, whatever has its name by now.
  // Returns -ENOENT where the system has no /proc.
  virtual int Reopen(int fd, int flags);
  virtual void Close(int fd);
  virtual int64_t Write(int fd, const char* from, int64_t bytes,
                        int64_t offset);
  virtual int64_t Read(int fd, char* to, int64_t bytes, int64_t offset);
  virtual int Sync(int fd);
  // Reserves room on the disk; -EOPNOTSUPP where the file system cannot.
  virtual int Allocate(int fd, int64_t begin, int64_t bytes);
  virtual int Truncate(int fd, int64_t bytes);
  // Makes the system begin to write these bytes to the disk, so that Sync has
  // less to wait for. It is a hint: Sync gives the same result without it.
  virtual void StartSync(int fd, int64_t begin, int64_t bytes);
  virtual int Stat(int fd, struct stat* info);
  virtual int Rename(int folder, const std::string& from,
                     const std::string& to);
  virtual int Remove(int folder, const std::string& name);
  virtual int MakeFolder(int folder, const std::string& name);
  virtual int RemoveFolder(int folder, const std::string& name);
  // Lists the names in a folder, without "." and "..", in no order.
  virtual int List(int folder, std::vector<std::string>* names);
  // Returns the bytes that the disk of an open folder still has for this user.
  virtual int64_t FreeBytes(int folder);
  // Locks a whole file for writing; the lock dies with its holder, over NFS too
  // (fcntl's F_OFD_SETLK). Returns -EAGAIN if another process holds it.
  virtual int Lock(int fd);
  // Returns a ring for `depth` concurrent reads and writes; null: use Read and
  // Write, one at a time.
  virtual std::unique_ptr<DiskRing> MakeRing(unsigned depth);
  // Receives a ring's answer to a read or write at `offset`; the returned value
  // replaces it.
  virtual int64_t Completed(bool write, int64_t offset, int64_t result);

 private:
  const mode_t file_mode_;
};

// Repeats `call`, a call of one of these methods, until no signal interrupts
// it, and returns its result.
template <class Call>
auto Uninterrupted(const Call& call) -> decltype(call()) {
  for (;;) {
    const auto result = call();
    if (result != -EINTR) return result;
  }
}

}  // namespace tessera
#endif  // BASE_DISK_FILE_SYSTEM_H_
