// Replicas: before sharding, every rank holds the whole model; here they are
// made, or checked, equal.
#ifndef ENGINE_BUILD_INITIAL_SYNC_H_
#define ENGINE_BUILD_INITIAL_SYNC_H_

#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "sharding/partition/partition.h"

namespace tessera {

// Rank 0's values of all parameters, `ignored` ones that are strided among
// them, and of all buffers replace the others'. COLLECTIVE.
absl::Status BroadcastFromRank0(const torch::nn::Module& module,
                                absl::Span<const UnitPlan> plans,
                                absl::Span<const NamedParameter> ignored,
                                Communicator* comm);

// Checks that names, sizes and, if asked for, values of all parameters are the
// same on all ranks; InvalidArgument names the first that differs and the rank.
// Returns, by NamedParameter::index, whether some rank requires its gradient.
// COLLECTIVE.
absl::StatusOr<std::vector<bool>> CheckEqual(absl::Span<const UnitPlan> plans,
                                             Communicator* comm, bool values);

// The same for parameters that the engine leaves alone, as far as they are
// strided. COLLECTIVE.
absl::Status CheckIgnoredEqual(absl::Span<const NamedParameter> ignored,
                               Communicator* comm, bool values);

// The same for the module's strided buffers, values too. COLLECTIVE.
absl::Status CheckBuffersEqual(const torch::nn::Module& module,
                               Communicator* comm);

// As Communicator::AgreeEqual. COLLECTIVE.
absl::Status CheckSame(absl::string_view mine, absl::string_view what,
                       Communicator* comm);

// Dtype, sizes and strides of a tensor; equal for equal ones.
std::string GeometryOf(const at::Tensor& tensor);

}  // namespace tessera
#endif  // ENGINE_BUILD_INITIAL_SYNC_H_
