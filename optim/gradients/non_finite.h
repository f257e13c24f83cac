// Finds the gradients of a step that are not finite, to explain an overflow.
#ifndef OPTIM_GRADIENTS_NON_FINITE_H_
#define OPTIM_GRADIENTS_NON_FINITE_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "optim/gradients/non_finite_gradient.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/gradient/gradients.h"

namespace tessera {

// Finds them among the step's gradients so far, in the model's order. `comm`:
// all ranks, those of the units' shard group and its replicas, in this order.
// Results and errors are identical on all of them: ResourceExhausted, and those
// of a disk where gradients are. Waits for a device. COLLECTIVE.
absl::StatusOr<std::vector<NonFiniteGradient>> FindNonFinite(
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    const Gradients& gradients, Communicator* comm);

// The first `most` of them in words, for messages:
//   'in.weight' of unit 'in' (3 NaN, 1 infinite; in the shards of ranks 0, 1)
// and how many more there are. LOCAL.
std::string DescribeNonFinite(absl::Span<const NonFiniteGradient> gradients,
                              size_t most);

}  // namespace tessera
#endif  // OPTIM_GRADIENTS_NON_FINITE_H_
