// MemoryDisk is a file system in memory, for tests. It keeps apart what a
// program sees and what a power failure would leave, and it can refuse any
// call.
//
//   MemoryDisk disk;
//   disk.before = [](int64_t k, const char*) { return k == 7 ? -ENOSPC : 0; };
//   ... a save through it ...
//   std::unique_ptr<MemoryDisk> after = disk.AfterPowerFailure(keeps);
//
// A file's bytes are on the disk once it is synced, and its name once its
// folder is. Until then a failure may keep either, both or neither, and of the
// written bytes any sectors, in any order.
//
// Threads: any.
#ifndef CHECKPOINT_DISK_MEMORY_DISK_H_
#define CHECKPOINT_DISK_MEMORY_DISK_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "checkpoint/disk/file_system.h"

namespace tessera {

class MemoryDisk : public FileSystem {
 public:
  MemoryDisk();

  // Decides whether a power failure keeps something that was not synced: a
  // sector of a write, a file's length, or a change of a name. Called for each.
  using Keeps = std::function<bool(bool is_name)>;
  std::unique_ptr<MemoryDisk> AfterPowerFailure(const Keeps& keeps) const;

  int Open(int folder, const std::string& name, int flags) override;
  int Reopen(int fd, int flags) override;
  void Close(int fd) override;
  int64_t Write(int fd, const char* from, int64_t bytes,
                int64_t offset) override;
  int64_t Read(int fd, char* to, int64_t bytes, int64_t offset) override;
  int Sync(int fd) override;
  void StartSync(int, int64_t, int64_t bytes) override { started_ += bytes; }
  int Stat(int fd, struct stat* info) override;
  int Rename(int folder, const std::string& from,
             const std::string& to) override;
  int Remove(int folder, const std::string& name) override;
  int MakeFolder(int folder, const std::string& name) override;
  int RemoveFolder(int folder, const std::string& name) override;
  int List(int folder, std::vector<std::string>* names) override;
  int Lock(int fd) override;
  int64_t FreeBytes(int folder) override;
  std::unique_ptr<ReadQueue> MakeReadQueue(unsigned) override {
    return nullptr;
  }

  // Returns the number of calls so far; Close and StartSync do not count.
  int64_t calls() const { return calls_; }
  // Returns the bytes of all calls of StartSync.
  int64_t started_bytes() const { return started_; }
  // Runs before call number k, counted from 0, does anything; it may make calls
  // itself. It returns the call's result, or 0 to let the call pass. A write
  // that gets a positive number writes so many bytes.
  std::function<int64_t(int64_t k, const char* call)> before;
  // Bytes that all files together may have; writes beyond are cut short or fail
  // with -ENOSPC. -1: no limit.
  int64_t capacity = -1;
  // Returns the names in the folder at `path`, with the files' bytes.
  std::map<std::string, std::string> FilesIn(const std::string& path);

 private:
  struct Node {
    bool folder = false;
    std::string bytes, synced_bytes;
    std::vector<std::pair<size_t, std::string>> unsynced;  // from an offset on
    std::map<std::string, std::shared_ptr<Node>> entries, synced_entries;
    int links = 1;
    int locked_by = -1;  // descriptor
  };
  using NodePtr = std::shared_ptr<Node>;

  int64_t Ask(const char* call);
  Node* FolderOf(int folder, const std::string& name, std::string* last);
  int64_t Filled() const;
  NodePtr Find(int folder, const std::string& name);
  static std::string Kept(const Node& file, const Keeps& keeps);
  static NodePtr CopyOf(const NodePtr& node, const Keeps& keeps,
                        std::map<const Node*, NodePtr>* copies);

  absl::Mutex mutex_;
  NodePtr root_;
  std::map<int, NodePtr> open_;
  int next_fd_ = 1000;
  std::atomic<int64_t> calls_{0};
  std::atomic<int64_t> started_{0};
};

}  // namespace tessera
#endif  // CHECKPOINT_DISK_MEMORY_DISK_H_
