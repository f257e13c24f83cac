#include "comm/launch/numa.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "comm/launch/cpus.h"

namespace tessera {
namespace {

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<int> SortedCpus(absl::string_view list) {
  std::vector<int> cpus = ParseCpuList(list);
  std::sort(cpus.begin(), cpus.end());
  return cpus;
}

}  // namespace

std::vector<std::string> NumaNodes(const std::string& root) {
  const std::string folder = root + "/sys/devices/system/node";
  std::vector<std::string> nodes;
  for (const int node : ParseCpuList(FirstLine(folder + "/online"))) {
    std::string cpus =
        FirstLine(absl::StrCat(folder, "/node", node, "/cpulist"));
    if (!cpus.empty()) nodes.push_back(std::move(cpus));  // else memory alone
  }
  return nodes;
}

std::vector<std::string> BindToNodes(const std::vector<std::string>& nodes,
                                     const std::vector<std::string>& cpus) {
  const size_t ranks = cpus.size();
  const std::vector<int> allowed = SortedCpus(ranks == 0 ? "" : cpus[0]);
  for (const std::string& list : cpus) {
    if (SortedCpus(list) != allowed) return cpus;
  }
  std::vector<std::vector<int>> usable;
  for (const std::string& node : nodes) {
    const std::vector<int> all = SortedCpus(node);
    std::vector<int> here;
    std::set_intersection(all.begin(), all.end(), allowed.begin(),
                          allowed.end(), std::back_inserter(here));
    if (!here.empty()) usable.push_back(std::move(here));
  }
  const size_t count = usable.size();
  if (count < 2) return cpus;
  std::vector<std::string> bound;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const size_t first = rank * count / ranks;
    const size_t end = ranks < count ? (rank + 1) * count / ranks : first + 1;
    std::vector<int> own;
    for (size_t node = first; node < end; ++node) {
      own.insert(own.end(), usable[node].begin(), usable[node].end());
    }
    bound.push_back(absl::StrJoin(own, ","));
  }
  return bound;
}

absl::Status RunOn(absl::string_view cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : ParseCpuList(cpus)) {
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  }
  if (sched_setaffinity(0, sizeof(set), &set) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(
      errno, absl::StrCat("cannot run on the processors ", cpus));
}

}  // namespace tessera
