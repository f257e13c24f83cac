// What a Backward is multiplied with, besides the loss scale: its weight, and
// what comes from outside. The table is docs/guide.md's ("What scales a
// gradient").
//
// Why the losses of one micro-batch must have one weight: the step's gradient
// is divided by the number of samples at last, once for all that was added up.
// Two losses of the same samples add up to one loss of them, so these are
// counted with the first. Of losses with different weights there would be two
// such numbers, and one sum.
#include <cmath>

#include "absl/strings/str_cat.h"
#include "config/config.pb.h"
#include "engine/train/trainer.h"

namespace tessera {

absl::Status Trainer::CheckWeight(const BackwardOptions& options) const {
  if (options.weight.has_value() &&
      !(std::isfinite(*options.weight) && *options.weight >= 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("Backward: expected a finite weight of at least 0, got ",
                     *options.weight));
  }
  if (optimization_.weighted().has_value() &&
      *optimization_.weighted() != options.weight.has_value()) {
    return absl::FailedPreconditionError(
        "Backward: some micro-batches of this step have a weight and some have "
        "none");
  }
  if (options.weight.has_value() && IsAnotherLoss() &&
      options.weight != weight_) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Backward: this loss has the weight ", *options.weight,
        ", and the one before it of the same micro-batch (more_losses) had ",
        *weight_,
        "; the losses of one micro-batch are of the same samples: give all of "
        "them the same weight, and multiply a loss that is to count more or "
        "less"));
  }
  return absl::OkStatus();
}

// Gradients from outside are as those of the loss, except that the accumulation
// count does not divide them: weights do that, through their sum, so it comes
// in here.
void Trainer::ScaleMicroBatch(const BackwardOptions& options,
                              MicroBatch* micro_batch) {
  micro_batch->another_loss = IsAnotherLoss();
  if (options.weight.has_value()) {
    micro_batch->weight =
        *options.weight / optimization_.gradients()->weight_unit();
    if (micro_batch->another_loss) {
      absl::StrAppend(&micro_batch->position, ", another loss of the samples");
    }
  }
  if (!options.add_outside) return;
  const auto count = static_cast<double>(config_.gradient_accumulation_steps());
  micro_batch->outside_factor =
      KnownScales().made *
      (options.weight.has_value() ? *micro_batch->weight * count : 1);
}

}  // namespace tessera
