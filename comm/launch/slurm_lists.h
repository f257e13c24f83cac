// The two compressed lists in Slurm's variables. Pure text; no Slurm needed.
#ifndef COMM_LAUNCH_SLURM_LISTS_H_
#define COMM_LAUNCH_SLURM_LISTS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

// The first host of a list of hosts: "node[01-03,7],login" -> "node01",
// "rack[2-3]n[10,12]-ib" -> "rack2n10-ib". Returns InvalidArgument, with the
// list, if it is not one.
absl::StatusOr<std::string> FirstSlurmHost(absl::string_view list);

// Tasks on each node: "2(x3),1" -> 2, 2, 2, 1. Returns InvalidArgument, with
// the list, if it is not one.
absl::StatusOr<std::vector<int>> SlurmTaskCounts(absl::string_view list);

}  // namespace tessera
#endif  // COMM_LAUNCH_SLURM_LISTS_H_
