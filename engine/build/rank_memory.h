// How much of its host's or device's memory a rank may use.
#ifndef ENGINE_BUILD_RANK_MEMORY_H_
#define ENGINE_BUILD_RANK_MEMORY_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"

namespace torch::nn {
class Module;
}

namespace tessera {

// Returns nine tenths of the host's available memory, divided by `ranks`; on a
// device, nine tenths of its free memory. LOCAL.
absl::StatusOr<int64_t> RankMemory(at::Device device, int ranks);

// Returns `limit` where it is above 0, else RankMemory among `local_world_size`
// ranks and, on the CPU, the memory of the module's parameters, which an engine
// takes over: a plan counts them, so they count as available. The least of all
// ranks, identical on all. `where` is for messages. COLLECTIVE.
absl::StatusOr<int64_t> AgreeOnRankMemory(int64_t limit, at::Device device,
                                          int local_world_size,
                                          const torch::nn::Module& module,
                                          absl::string_view where,
                                          Communicator* comm);

}  // namespace tessera
#endif  // ENGINE_BUILD_RANK_MEMORY_H_
