// MemoryCgroup moves this process into a control group of the kernel's while it
// lives, if that is allowed (root, and a memory controller that is mounted
// writable). What the process touches from then on must stay below the limit,
// or the kernel ends the process. Memory that it had before does not count.
// limit, or the kernel ends the process. What it had before does not count.
#ifndef TESTS_OFFLOAD_MEMORY_CGROUP_H_
#define TESTS_OFFLOAD_MEMORY_CGROUP_H_

#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace tessera {

class MemoryCgroup {
 public:
  explicit MemoryCgroup(int64_t limit_bytes) {
    // Version 1 has a tree for memory, version 2 one tree for all.
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
      const bool v1 = absl::StrContains(line, ":memory:");
      if (!v1 && !absl::StartsWith(line, "0::")) continue;
      const std::string own =
          absl::StrCat(v1 ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup",
                       line.substr(line.rfind(':') + 1));
      if (Enter(own, v1 ? "memory.limit_in_bytes" : "memory.max",
                limit_bytes)) {
        return;
      }
    }
  }
  ~MemoryCgroup() {
    if (!entered()) return;
    (void)Write(absl::StrCat(before_, "/cgroup.procs"), getpid());
    (void)rmdir(group_.c_str());
  }
  MemoryCgroup(const MemoryCgroup&) = delete;
  MemoryCgroup& operator=(const MemoryCgroup&) = delete;

  bool entered() const { return !group_.empty(); }

 private:
  bool Enter(const std::string& own, const char* limit, int64_t bytes) {
    const std::string group = absl::StrCat(own, "/tessera-", getpid());
    if (mkdir(group.c_str(), 0700) != 0) return false;
    if (Write(absl::StrCat(group, "/", limit), bytes) &&
        Write(absl::StrCat(group, "/cgroup.procs"), getpid())) {
      before_ = own;
      group_ = group;
      return true;
    }
    (void)rmdir(group.c_str());
    return false;
  }
  static bool Write(const std::string& file, int64_t value) {
    struct stat is;
    if (stat(file.c_str(), &is) != 0) return false;
    std::ofstream out(file);
    out << value << std::flush;
    return out.good();
  }

  std::string before_, group_;
};

}  // namespace tessera
#endif  // TESTS_OFFLOAD_MEMORY_CGROUP_H_
