// Why a unit is stepped only where this rank itself has all that is expected: a
// parameter that no rank had a gradient for is not stepped at all, and what the
// others had is known from the agreement at the end of backward alone. A unit
// that is left out here is stepped by ShardedOptimizer::Step, with the same
// result; so is a parameter that was not expected, apart from the others of its
// unit.
//
// Why nothing is published here: publishing is a collective at stages 1 and 2,
// and ranks may come to their units in different orders.
#include "optim/steps_in_backward.h"

#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "optim/apply_step.h"
#include "optim/gradients/clipping.h"

namespace tessera {

void StepsInBackward::Begin(std::vector<OptimizerOptions> options,
                            double divisor, double max_value) {
  End();
  options_ = counts_.WithShares(std::move(options));
  divisor_ = divisor;
  max_value_ = max_value;
}

void StepsInBackward::End() {
  units_.assign(units_.size(), Unit());
  tensors_.clear();
}

absl::Status StepsInBackward::Step(size_t u, FlatGradient* gradient) {
  if (!gradient->AllArrived()) return absl::OkStatus();
  return CatchTorch("step in backward", [&] {
    TorchScope scope;
    return StepUnit(u, gradient);
  });
}

absl::Status StepsInBackward::StepUnit(size_t u, FlatGradient* gradient) {
  FlatParameter& flat = *flats_[u];
  TESSERA_RETURN_IF_ERROR(states_.Make(u));
  const std::vector<bool> expected = gradient->expected();
  TESSERA_ASSIGN_OR_RETURN(const bool alone, flat.TryPrepareUpdate(expected));
  if (!alone) return absl::OkStatus();
  bool changed = false;
  const absl::StatusOr<bool> written =
      CatchTorch(flat.name(), [&]() -> absl::StatusOr<bool> {
        if (max_value_ > 0) {
          ClampComing(flat, *gradient, max_value_ * divisor_);
        }
        const UnitStep step(flat, expected, counts_.steps(), options_,
                            groups_.of, 1 / divisor_);
        return StepHere(&flat, step, gradient->coming(), &tensors_, &changed);
      });
  if (changed) {
    gradient->UseUp();
  } else {
    flat.Unblock();
  }
  TESSERA_RETURN_IF_ERROR(written.status());
  units_[u] = {true, *written};
  return absl::OkStatus();
}

}  // namespace tessera
