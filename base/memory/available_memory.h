// Finds how much memory a program on this host may still take.
#ifndef BASE_MEMORY_AVAILABLE_MEMORY_H_
#define BASE_MEMORY_AVAILABLE_MEMORY_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace tessera {

// Returns the bytes of host memory that can be had without swapping: the
// kernel's MemAvailable, or what the cgroup (v2) and its parents leave,
// whichever is less. All processes of the host share it. `root` is put before
// /proc and /sys, for tests. Returns Unavailable where the kernel does not say.
// LOCAL.
absl::StatusOr<int64_t> AvailableHostMemory(const std::string& root = "");

}  // namespace tessera
#endif  // BASE_MEMORY_AVAILABLE_MEMORY_H_
