// Units that are stepped for good within a Backward
// (sharding.step_in_backward): what forbids it, and what follows from it.
//
// Why a Backward that fails then ends the engine: some units have the values of
// the next step and some those of this one, and no gradient is left with which
// either could be made of the other. Ranks tell each other whether any of them
// has stepped a unit, since all must say the same afterwards.
//
// Why no other call may come between Backward and Step: what it would read of
// parameters and states is neither of this step nor of the next, and what it
// would drop or change (gradients, rates) has been used.
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/train/trainer.h"

namespace tessera {
namespace {

constexpr char kWhy[] =
    "; sharding.step_in_backward steps a unit as soon as it has a gradient";

}  // namespace

// This is not told to the other ranks: without sums there is no agreement.
absl::Status Trainer::CheckReducesInBackward() const {
  if (!settings_.gradients.uses_up || no_sync_ == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "Backward: an Engine::NoSyncScope keeps gradients for a later Backward",
      kWhy, "; leave one of the two out"));
}

absl::Status Trainer::CheckStepsInBackward(
    const BackwardOptions& options) const {
  if (!settings_.gradients.uses_up) return absl::OkStatus();
  if (options.weight.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Backward: BackwardOptions::weight divides gradients by the weights of "
        "all ranks once all are known",
        kWhy, "; leave one of the two out"));
  }
  if (options.more_losses) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Backward: BackwardOptions::more_losses adds gradients to those of "
        "this loss",
        kWhy, "; add the losses up, or leave that key out"));
  }
  return absl::OkStatus();
}

// Waits for readers of masters and states (asynchronous checkpoints): a unit
// may be stepped from now on.
void Trainer::StepInBackward(MicroBatch* micro_batch) {
  guard_->BeforeChange();
  optimization_.optimizer()->in_backward().Begin(groups_.Scheduled(step_),
                                                 optimization_.divisor(),
                                                 settings_.step.max_value);
  micro_batch->uses_up = true;
  micro_batch->reduced = [this](size_t flat) {
    return optimization_.optimizer()->in_backward().Step(
        flat, &optimization_.gradients()->of(flat));
  };
}

// No unit can be used until Step, whether this rank has stepped it or not: all
// ranks are to come to the same error.
absl::Status Trainer::EndStepsInBackward(const absl::Status& backward) {
  if (!settings_.gradients.uses_up) return backward;
  if (backward.ok()) {
    guard_->life().SetHalfStepped(true);
    for (const auto& flat : guard_->model().flats()) flat->Block();
    return backward;
  }
  if (!optimization_.gradients()->any_used_up()) return backward;
  guard_->life().Lose(backward);
  return guard_->life().CheckUsable();
}

void Trainer::EndHalfStepped() {
  if (!guard_->life().half_stepped()) return;
  guard_->life().SetHalfStepped(false);
  for (const auto& flat : guard_->model().flats()) flat->Unblock();
}

}  // namespace tessera
