#include "base/memory/available_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace tessera {
namespace {

// Returns the number that a file holds; nullopt if it holds none ("max").
std::optional<int64_t> NumberIn(const std::string& path) {
  std::ifstream in(path);
  int64_t number = 0;
  if (in >> number) return number;
  return std::nullopt;
}

std::optional<int64_t> MemAvailable(const std::string& root) {
  std::ifstream in(root + "/proc/meminfo");
  std::string key;
  int64_t kib = 0;
  std::string rest;
  while (in >> key >> kib) {
    if (key == "MemAvailable:") return kib * 1024;
    std::getline(in, rest);
  }
  return std::nullopt;
}

// Returns the least that this process's cgroup or one above it leaves.
int64_t CgroupRoom(const std::string& root) {
  int64_t room = std::numeric_limits<int64_t>::max();
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
    if (!absl::StartsWith(line, "0::")) continue;  // cgroup v2
    std::string path = line.substr(3);
    for (;;) {
      const std::string dir = absl::StrCat(root, "/sys/fs/cgroup", path);
      const auto limit = NumberIn(dir + "/memory.max");
      const auto used = NumberIn(dir + "/memory.current");
      if (limit && used)
        room = std::min(room, std::max<int64_t>(0, *limit - *used));
      if (path.empty() || path == "/") break;
      path = path.substr(0, path.rfind('/'));
    }
  }
  return room;
}

}  // namespace

absl::StatusOr<int64_t> AvailableHostMemory(const std::string& root) {
  const auto available = MemAvailable(root);
  if (!available) {
    return absl::UnavailableError(
        absl::StrCat(root, "/proc/meminfo has no MemAvailable"));
  }
  return std::min(*available, CgroupRoom(root));
}

}  // namespace tessera
