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
#ifndef TESTING_DISK_MEMORY_DISK_H_
#define TESTING_DISK_MEMORY_DISK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "testing/disk/faulty_files.h"

namespace tessera {

class MemoryDisk : public FaultyFiles {
 public:
  MemoryDisk();
  ~MemoryDisk() override;

  // Decides whether a power failure keeps something that was not synced: a
  // sector of a write, a file's length, or a change of a name. Called for each.
  using Keeps = std::function<bool(bool is_name)>;
  std::unique_ptr<MemoryDisk> AfterPowerFailure(const Keeps& keeps) const;

  // Returns the bytes of all calls of StartSync.
  int64_t started_bytes() const;
  // Bytes that all files together may have; writes beyond are cut short or fail
  // with -ENOSPC. -1: no limit.
  int64_t capacity = -1;
  // Returns the names in the folder at `path`, with the files' bytes.
  std::map<std::string, std::string> FilesIn(const std::string& path);

 private:
  class Files;
  explicit MemoryDisk(std::unique_ptr<Files> files);
  const std::unique_ptr<Files> files_;
};

}  // namespace tessera
#endif  // TESTING_DISK_MEMORY_DISK_H_
