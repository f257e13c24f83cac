// Makes, or checks, the ranks' replicas equal: before sharding, every rank
// holds the whole model.
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

// Replaces all parameters (`ignored` ones too, if they are strided) and all
// buffers by rank 0's values. COLLECTIVE.
absl::Status BroadcastFromRank0(const torch::nn::Module& module,
                                absl::Span<const UnitPlan> plans,
                                absl::Span<const NamedParameter> ignored,
                                Communicator* comm);

// Checks that names, sizes and, if asked for, values of all parameters are the
// same on all ranks; InvalidArgument names the first that differs and the rank.
// A rank that is alone reads no values.
// Returns, by NamedParameter::index, whether some rank requires its gradient.
// COLLECTIVE.
absl::StatusOr<std::vector<bool>> CheckEqual(absl::Span<const UnitPlan> plans,
                                             Communicator* comm, bool values);

// As CheckEqual, for parameters that the engine leaves alone, if they are
// strided. COLLECTIVE.
absl::Status CheckIgnoredEqual(absl::Span<const NamedParameter> ignored,
                               Communicator* comm, bool values);

// As CheckEqual, for the module's strided buffers, values included. COLLECTIVE.
absl::Status CheckBuffersEqual(const torch::nn::Module& module,
                               Communicator* comm);

// Checks that `mine` is equal on all ranks, as Communicator::AgreeEqual.
// COLLECTIVE.
absl::Status CheckSame(absl::string_view mine, absl::string_view what,
                       Communicator* comm);

// Returns dtype, sizes and strides of a tensor as text, for comparison.
std::string GeometryOf(const at::Tensor& tensor);

}  // namespace tessera
#endif  // ENGINE_BUILD_INITIAL_SYNC_H_
