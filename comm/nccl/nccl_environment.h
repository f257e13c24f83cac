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

// Makes NCCL start the collectives of different communicators on a device in
// the order in which the host has given them, unless the environment says
// otherwise (NCCL_LAUNCH_ORDER_IMPLICIT), and returns whether it will: then two
// communicators of the same ranks cannot wait for each other. As
// SetNcclEnvironment, once set it only reads the environment.
bool StartInHostOrder();

}  // namespace tessera
#endif  // COMM_NCCL_NCCL_ENVIRONMENT_H_
