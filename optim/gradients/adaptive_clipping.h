// Adaptive gradient clipping: limits the gradient's norm of each output unit of
// a parameter (its part with one index of dim 0) to `clipping` times the norm
// of the weights:
//
//   gradient *= min(1, clipping * max(|weights|, eps) / |gradient|)
//
// A parameter of one dimension or none is one unit. Norms are those of whole
// units, in exact sums (optim/norm/grad_norm.h), so the bits do not depend on
// where shards cut; ranks exchange sums only of units that are cut.
//
// Sources: Brock et al., "High-Performance Large-Scale Image Recognition
// Without Normalization", 2021; units as timm's adaptive_clip_grad has them.
#ifndef OPTIM_GRADIENTS_ADAPTIVE_CLIPPING_H_
#define OPTIM_GRADIENTS_ADAPTIVE_CLIPPING_H_

#include <functional>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/gradient/gradients.h"

namespace tessera {

struct AdaptiveClipping {
  std::vector<double> clipping;  // of each parameter of the model; 0: none
  double eps = 1e-3;             // above 0
  double divisor = 1;            // that the step still divides gradients by
};

// Multiplies the gradients in place; those of a unit whose norm is not finite
// stay as they are. `before_change` is called before the first is changed.
// COLLECTIVE over the shard group: one exchange, where shards are cut. Waits
// for a device. ResourceExhausted, errors of a disk, and DataLoss. REQUIRES:
// Gradients::Enter, FlatParameter::PrepareUpdate of all, no early steps.
absl::Status ClipAdaptively(
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    const AdaptiveClipping& options, const std::function<void()>& before_change,
    Gradients* gradients);

}  // namespace tessera
#endif  // OPTIM_GRADIENTS_ADAPTIVE_CLIPPING_H_
