// Replicas: before sharding, every rank holds the whole model; here they are
// made, or checked, equal.
#ifndef ENGINE_REPLICAS_H_
#define ENGINE_REPLICAS_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "sharding/partition.h"

namespace tessera {

// Rank 0's values of all parameters and buffers replace the others'.
// COLLECTIVE.
absl::Status BroadcastFromRank0(const torch::nn::Module& module,
                                absl::Span<const UnitPlan> plans,
                                Communicator* comm);

// Checks that names, sizes and values of all parameters are the same on all
// ranks; InvalidArgument names the first that differs and the rank. Returns,
// per parameter, whether some rank requires its gradient. COLLECTIVE.
absl::StatusOr<std::vector<bool>> CheckEqual(absl::Span<const UnitPlan> plans,
                                             Communicator* comm);

}  // namespace tessera
#endif  // ENGINE_REPLICAS_H_
