// Changes a step's gradients in place, before the optimizer reads them:
// clipping by value (then of units: adaptive_clipping.h), and clipping of
// groups of parameters by norms of their own. Offloaded gradients (on the host,
// on a disk) are read and written once more for it.
//
// Early steps (optim/early_steps.h) use gradients as they arrived: callers must
// make none, or drop them first.
//
// Sources: torch.nn.utils.clip_grad_value_ and clip_grad_norm_.
#ifndef OPTIM_GRADIENTS_CLIPPING_H_
#define OPTIM_GRADIENTS_CLIPPING_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/gradient/gradients.h"

namespace tessera {

// Clamps each element (each part of a complex one) to [-bound, bound], rounded
// to the gradients' dtype (which may be beyond the bound in 16 bits); NaN
// stays. `bound` applies to the gradients as they are, before the step divides
// them. `keep_infinite`: infinities stay too, for steps that are skipped
// because of them. LOCAL; ASYNC on devices, on the current stream.
// ResourceExhausted, and errors of a disk. REQUIRES: bound > 0,
// Gradients::Enter.
absl::Status ClampGradients(
    const std::vector<std::shared_ptr<FlatParameter>>& flats, double bound,
    bool keep_infinite, Gradients* gradients);

// As ClampGradients, for one unit whose sums will be the step's gradient:
// clamps FlatGradient::coming() of the expected parameters. LOCAL; throws.
void ClampComing(const FlatParameter& flat, const FlatGradient& gradient,
                 double bound);

// Multiplies the gradients of parameter i of the model by factors[set_of[i]];
// where that is 1 they are not touched. LOCAL, ASYNC and errors as for
// ClampGradients.
absl::Status MultiplyGradients(
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    const std::vector<double>& factors, const std::vector<int>& set_of,
    Gradients* gradients);

}  // namespace tessera
#endif  // OPTIM_GRADIENTS_CLIPPING_H_
