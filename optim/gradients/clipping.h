// What changes a step's gradients where they lie, before the optimizer reads
// them: clipping by value (then of units: adaptive_clipping.h), and of groups
// of parameters each by a norm of its own. Gradients that lie elsewhere (on the
// host, on a disk) are read and written once more for it.
//
// Early steps (optim/sharded_optimizer.h) are made with gradients as they came:
// who calls these makes none, or drops them before.
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

// Each element, of a complex one each part, that is beyond [-bound, bound]
// becomes the nearer end, rounded to the gradients' dtype (which may be
// beyond the bound in 16 bits); NaN stays. `bound`: of
// the gradients as they are, which the step still divides.
// `keep_infinite`: infinities stay too, for who skips steps because of them.
// LOCAL; ASYNC on devices, on the current stream. ResourceExhausted, and errors
// of a disk. REQUIRES: bound > 0, Gradients::Enter.
absl::Status ClampGradients(
    const std::vector<std::shared_ptr<FlatParameter>>& flats, double bound,
    bool keep_infinite, Gradients* gradients);

// Multiplies the gradients of parameter i of the model by
// factors[set_of[i]]; where that is 1 they are not touched. LOCAL,
// ASYNC and errors as above.
absl::Status MultiplyGradients(
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    const std::vector<double>& factors, const std::vector<int>& set_of,
    Gradients* gradients);

}  // namespace tessera
#endif  // OPTIM_GRADIENTS_CLIPPING_H_
