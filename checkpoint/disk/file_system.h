// FileSystem: the system calls by which checkpoints reach a disk and come back.
// All of them go through here, so that tests can refuse any one of them, cut it
// short, or record in which order they come. No torch.
//
// Threads: all methods may be called from any thread.
#ifndef CHECKPOINT_DISK_FILE_SYSTEM_H_
#define CHECKPOINT_DISK_FILE_SYSTEM_H_

#include <errno.h>
#include <sys/stat.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/disk/read_queue.h"

namespace tessera {

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  // The system's own.
  static FileSystem* Real();

  // As the system calls of these names, relative to the descriptor of a folder
  // where they take one: what they return, or -errno. Descriptors are closed on
  // exec.
  virtual int Open(int folder, const std::string& name, int flags);
  // Opens what a descriptor of O_PATH stands for, whatever has its name by now.
  // -ENOENT where the system has no /proc.
  virtual int Reopen(int fd, int flags);
  virtual void Close(int fd);
  virtual int64_t Write(int fd, const char* from, int64_t bytes,
                        int64_t offset);
  virtual int64_t Read(int fd, char* to, int64_t bytes, int64_t offset);
  virtual int Sync(int fd);
  // Has the system begin to write these bytes to the disk, so that Sync has
  // less to wait for. A hint: without it the same is on the disk after Sync.
  virtual void StartSync(int fd, int64_t begin, int64_t bytes);
  virtual int Stat(int fd, struct stat* info);
  virtual int Rename(int folder, const std::string& from,
                     const std::string& to);
  virtual int Remove(int folder, const std::string& name);
  virtual int MakeFolder(int folder, const std::string& name);
  virtual int RemoveFolder(int folder, const std::string& name);
  // Names in a folder, without "." and "..", in no order.
  virtual int List(int folder, std::vector<std::string>* names);
  // Bytes that the disk of an open folder still has for this user.
  virtual int64_t FreeBytes(int folder);
  // A lock of a whole file for writing that dies with its holder, over NFS too
  // (fcntl's F_OFD_SETLK). -EAGAIN: another holds it.
  virtual int Lock(int fd);
  // Of reads that go on meanwhile; null: they are made by Read, one at a time.
  virtual std::unique_ptr<ReadQueue> MakeReadQueue(unsigned depth);
};

// What `call`, of one of these methods, returns once no signal cuts it short.
template <class Call>
auto Uninterrupted(const Call& call) -> decltype(call()) {
  for (;;) {
    const auto result = call();
    if (result != -EINTR) return result;
  }
}

}  // namespace tessera
#endif  // CHECKPOINT_DISK_FILE_SYSTEM_H_
