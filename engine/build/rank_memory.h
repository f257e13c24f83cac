// What a rank may use of its host's or device's memory.
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

// Nine tenths of what is there, which `ranks` of this host share (on a device:
// of what it has free). LOCAL.
absl::StatusOr<int64_t> RankMemory(at::Device device, int ranks);

// Bytes of parameters on the CPU, whose memory an engine takes over: of a plan,
// which counts them, they are to be had. LOCAL.
int64_t TakenOverBytes(const torch::nn::Module& module);

// `limit` where it is above 0. Else nine tenths of what is there, which the
// ranks of a host share (`local_world_size`), and `taken_over`; of the rank
// that has the least, the same on all. `where` is for messages. COLLECTIVE.
absl::StatusOr<int64_t> AgreeOnRankMemory(int64_t limit, at::Device device,
                                          int local_world_size,
                                          int64_t taken_over,
                                          absl::string_view where,
                                          Communicator* comm);

}  // namespace tessera
#endif  // ENGINE_BUILD_RANK_MEMORY_H_
