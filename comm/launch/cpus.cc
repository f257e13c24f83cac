#include "comm/launch/cpus.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace tessera {
namespace {

constexpr int kMaxCpu = 1 << 16;

// Where cgroup v2 is mounted, "" if nowhere. A line of mountinfo:
//   36 35 98:0 /root /sys/fs/cgroup rw,noatime shared:1 - cgroup2 cgroup rw
std::string CgroupMount(const std::string& root) {
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    const std::pair<absl::string_view, absl::string_view> halves =
        absl::StrSplit(line, absl::MaxSplits(" - ", 1));
    if (!absl::StartsWith(halves.second, "cgroup2 ")) continue;
    const std::vector<std::string> fields = absl::StrSplit(halves.first, ' ');
    if (fields.size() > 4) return fields[4];
  }
  return "";
}

// This process's group, relative to the mount: "/user.slice/x", "" if none.
std::string CgroupPath(const std::string& root) {
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (absl::StartsWith(line, "0::/")) return line.substr(3);
  }
  return "";
}

// "150000 100000" is 1.5, "max 100000" no limit.
std::optional<double> ReadCpuMax(const std::string& path) {
  std::ifstream file(path);
  std::string quota;
  double period = 0;
  double value = 0;
  if (!(file >> quota >> period) || !absl::SimpleAtod(quota, &value) ||
      !(period > 0) || !(value > 0)) {
    return std::nullopt;
  }
  return value / period;
}

}  // namespace

std::string AllowedCpus() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  // Fails on machines with more processors than the set has places.
  if (sched_getaffinity(0, sizeof(cpus), &cpus) != 0) return "";
  std::string list;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (!CPU_ISSET(i, &cpus)) continue;
    const int first = i;
    while (i + 1 < CPU_SETSIZE && CPU_ISSET(i + 1, &cpus)) ++i;
    absl::StrAppend(&list, list.empty() ? "" : ",", first);
    if (i > first) absl::StrAppend(&list, "-", i);
  }
  return list;
}

std::vector<int> ParseCpuList(absl::string_view list) {
  std::vector<int> cpus;
  for (absl::string_view range : absl::StrSplit(list, ',')) {
    const std::vector<absl::string_view> ends = absl::StrSplit(range, '-');
    int first = 0;
    int last = 0;
    if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &first) ||
        !absl::SimpleAtoi(ends.back(), &last) || first < 0 || last < first ||
        last > kMaxCpu) {
      return {};
    }
    for (int i = first; i <= last; ++i) cpus.push_back(i);
  }
  return cpus;
}

std::optional<double> CgroupCpus(const std::string& root) {
  const std::string mount = CgroupMount(root);
  std::string path = CgroupPath(root);
  std::optional<double> least;
  if (mount.empty() || path.empty()) return least;
  while (true) {
    const auto limit = ReadCpuMax(
        absl::StrCat(root, mount, path == "/" ? "" : path, "/cpu.max"));
    if (limit.has_value()) least = std::min(*limit, least.value_or(*limit));
    if (path == "/" || path.empty()) return least;
    path.resize(path.rfind('/'));
  }
}

int ThreadsOf(const std::vector<std::string>& cpus, int local_rank,
              std::optional<double> limit) {
  std::map<int, int> users;
  for (const std::string& list : cpus) {
    for (int cpu : ParseCpuList(list)) ++users[cpu];
  }
  double share = 0;
  for (int cpu : ParseCpuList(cpus[local_rank])) share += 1.0 / users[cpu];
  if (limit.has_value()) {
    share = std::min(share, *limit / static_cast<double>(cpus.size()));
  }
  // Thirds do not add up to one exactly.
  return std::max(1, static_cast<int>(share + 1e-6));
}

}  // namespace tessera
