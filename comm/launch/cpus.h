// Computes how many threads a rank may use: its share of the processors of its
// host. No torch.
//
// A launcher may bind each rank to processors of its own (mpirun, srun
// --cpus-per-task) or let all ranks of the host share them all (--world,
// torchrun). So a rank tells the others which processors it may run on, and
// each counts for a rank by one over the number of ranks that may use it.
#ifndef COMM_LAUNCH_CPUS_H_
#define COMM_LAUNCH_CPUS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera {

// Returns the processors that this thread may run on, as the kernel lists them:
// "0-3,8". "" if they are not known.
std::string AllowedCpus();

// Returns the numbers in such a list; none if it is not a list.
std::vector<int> ParseCpuList(absl::string_view list);

// Returns the processor time that this process's cgroups allow, in processors
// (1.5: 150 ms in each 100 ms), the least of all levels; nullopt without a
// limit. cgroup v2 only: cpu.max. `root` stands before /proc and /sys, for
// tests.
std::optional<double> CgroupCpus(const std::string& root = "");

// Returns the number of threads for rank `local_rank` of a host whose ranks may
// use the processors `cpus`, and together get at most `limit` processors. At
// least 1; unknown lists count as one processor.
int ThreadsOf(const std::vector<std::string>& cpus, int local_rank,
              std::optional<double> limit);

}  // namespace tessera
#endif  // COMM_LAUNCH_CPUS_H_
