// Norms of a step's gradients over all ranks, found on the host; a device finds
// its own (optim/device_kernels.h).
#ifndef OPTIM_GRADIENTS_GRADIENT_NORMS_H_
#define OPTIM_GRADIENTS_GRADIENT_NORMS_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/gradient/gradients.h"

namespace tessera {

// Returns the norms of `sets` sets of undivided gradients, identical on all
// ranks. `set_of`: the set of each parameter of the model. `comm`: the job.
// Internal if sums differ between replicas; ResourceExhausted and errors of a
// disk where gradients are there. Waits for a device. COLLECTIVE: one small
// exchange.
absl::StatusOr<std::vector<double>> GradientNorms(
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    const Gradients& gradients, const std::vector<int>& set_of, size_t sets,
    double norm_type, Communicator* comm);

}  // namespace tessera
#endif  // OPTIM_GRADIENTS_GRADIENT_NORMS_H_
