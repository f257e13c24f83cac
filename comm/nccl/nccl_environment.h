// NCCL's settings, which it reads from environment variables when its first
// communicator is made.
#ifndef COMM_NCCL_NCCL_ENVIRONMENT_H_
#define COMM_NCCL_NCCL_ENVIRONMENT_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace tessera {

// Returns InvalidArgument naming the first name that does not begin with NCCL_
// or cannot be a variable's, or whose value cannot.
absl::Status CheckNcclEnvironment(
    const std::map<std::string, std::string>& settings);

// Sets those that the environment does not hold yet, be it empty: what the user
// has set by hand stays. Returns "NAME=value" for each that was set. No other
// thread may read the environment meanwhile. REQUIRES: they were checked.
std::vector<std::string> SetNcclEnvironment(
    const std::map<std::string, std::string>& settings);

}  // namespace tessera
#endif  // COMM_NCCL_NCCL_ENVIRONMENT_H_
