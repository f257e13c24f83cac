// What came of the last step, where a device decides that, and what depends on
// it before it is known.
//
// Why a step does not just wait. The device is then idle from the end of its
// work until the host has been told, and has launched the next forward. So
// Step n gives the device everything, its own decision included (clipping,
// overflow), and returns. What it decided comes to the host by itself, and is
// taken
//
//   - by Step n + 1, at its start, on all ranks, where more depends on it than
//     a report: the number of steps, the rate and the divisor. By then a whole
//     forward and backward have been given to the device behind it; a host that
//     is even further ahead waits there, which costs the device nothing.
//   - by whoever asks (AwaitOutcome), on that rank alone. So nothing that ranks
//     compare may depend on who has settled: updates(), step_at_most().
//
// Between the two one thing depends on it: the scale of the losses of step
// n + 1, which an overflow in step n may have halved. There are two candidates,
// and the device takes its own (Seed).
//
// What a step that has returned had to say as an error, the next Step says: the
// same on all ranks.
//
// The other way round, what the next step will be is foreseen from the last one
// (AllowEarlySteps).
#include <cmath>
#include <utility>

#include "ATen/ops/full.h"
#include "ATen/ops/where.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "config/config.pb.h"
#include "engine/model/exclusive_scope.h"
#include "engine/train/trainer.h"
#include "offload/update_stream.h"

namespace tessera {

void Trainer::Report(const ShardedStepResult& result) {
  report_.skipped = result.skipped;
  report_.grad_norm = result.grad_norm;
  report_.clipped_norm = result.clipped_norm;
  report_.non_finite = result.non_finite;
  for (size_t g = 0; g < result.groups.size(); ++g) {
    report_.groups[g].grad_norm = result.groups[g].grad_norm;
    report_.groups[g].clipped_norm = result.groups[g].clipped_norm;
  }
  as_expected_ = !result.skipped &&
                 (settings_.step.max_norm <= 0 ||
                  result.grad_norm == result.clipped_norm) &&
                 one_backward_each_;
  if (!result.skipped) return;
  --step_;
  ++report_.skipped_steps;
}

// Units are stepped as their gradients come, where this backward is to be the
// step's last, and the step may be foreseen: gradients are divided by what is
// known, and not clipped (optim/early_steps.h). What changes
// gradients where they lie, for all of them or for a group, cannot be: the
// factor of the step would not tell. After a step that
// was not as expected none is, since what is made twice takes twice the disk's
// time.
void Trainer::AllowEarlySteps(const BackwardOptions& options,
                              MicroBatch* micro_batch) {
  ShardedOptimizer* const optimizer = optimization_.optimizer();
  if (optimizer == nullptr) return;
  optimizer->early().Drop();  // of a Backward before this one
  if (settings_.gradients.uses_up) return StepInBackward(micro_batch);
  const ShardedStepOptions& step = settings_.step;
  const bool may = settings_.offload.early_step && !step.changes_gradients() &&
                   optimizer->early().MayStart();
  const bool last = micro_steps_ + 1 == config_.gradient_accumulation_steps() &&
                    !has_backward_ && !options.more_losses &&
                    micro_batch->reduce;
  if (!may || !last || options.weight.has_value()) return;
  // A device has said by now what it decided: this forward has come after units
  // whose step on the host had to wait for that.
  AwaitOutcome();
  if (!as_expected_.value_or(settings_.step.max_norm <= 0)) return;
  micro_batch->reduced = [this, with = groups_.Scheduled(step_),
                          factor = 1 / optimization_.divisor()](size_t flat) {
    optimization_.optimizer()->early().Start(
        flat, &optimization_.gradients()->of(flat), with, factor);
    return absl::OkStatus();
  };
}

// An overflow that would be an error is named: nobody trains on after it, to
// ask for it then.
ShardedStepOptions Trainer::StepOptions() const {
  ShardedStepOptions options = settings_.step;
  options.name_overflows = options.name_overflows || watch_.names_next() ||
                           (optimization_.scaler() != nullptr &&
                            optimization_.scaler()->ends_at_overflow());
  return options;
}

// An error after which a program may go on all the same: the scale stays, and
// the next skipped step is the same error again.
absl::Status Trainer::JudgeOutcome() {
  absl::Status status;
  if (optimization_.scaler() != nullptr) {
    status = optimization_.scaler()->Update(report_.skipped);
  }
  const absl::Status judged =
      watch_.AddOutcome(report_, step_, report_.loss_scale);
  if (status.ok()) status = judged;
  if (status.ok()) {
    if (!settings_.step.name_overflows) report_.non_finite.clear();
    return status;
  }
  constexpr size_t kNamed = 5;
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(), "; in this step the gradients of ",
                   report_.non_finite.empty()
                       ? "all parameters are finite, but not their norm"
                       : DescribeNonFinite(report_.non_finite, kNamed)));
}

// Beside the step, which stays as it is.
absl::StatusOr<std::vector<NonFiniteGradient>> Trainer::NonFiniteGradients() {
  TESSERA_RETURN_IF_ERROR(guard_->life().CheckOpen());
  absl::Status mine;
  if (step_backwards_ == 0) {
    mine = absl::FailedPreconditionError(
        "no Engine::Backward since the last Step: there are no gradients; call "
        "it before Step");
  }
  TESSERA_RETURN_IF_ERROR(
      guard_->comm()->AgreeOk(mine, "Engine::NonFiniteGradients"));
  optimization_.gradients()->Enter();
  return FindNonFinite(guard_->model().flats(), *optimization_.gradients(),
                       guard_->comm());
}

void Trainer::AwaitOutcome() {
  if (!outcome_.has_value()) return;
  StepOutcome outcome = *std::exchange(outcome_, std::nullopt);
  const absl::StatusOr<ShardedStepResult> result = outcome.Take();
  if (!result.ok()) {
    failed_ = untold_ = result.status();
    return;
  }
  Report(*result);
  if (result->skipped) optimization_.optimizer()->counts().Uncount();
  untold_ = JudgeOutcome();
}

absl::Status Trainer::TakeUntold() {
  AwaitOutcome();
  return std::exchange(untold_, absl::OkStatus());
}

absl::Status Trainer::CheckNotFailed() {
  AwaitOutcome();
  return failed_;
}

// Before a step: what the last one had to say. Its gradients stay for the next
// call.
absl::Status Trainer::TakeOutcome() {
  const bool is_a_report = outcome_.has_value() && outcome_->only_reports();
  const bool wanted = observer_ != nullptr && observer_->awaits_outcome();
  if (!is_a_report || wanted) AwaitOutcome();
  const absl::Status untold = std::exchange(untold_, absl::OkStatus());
  return failed_.ok() ? untold : ExclusiveScope::FailAll(guard_, failed_);
}

Trainer::LossScales Trainer::Scales() const {
  if (optimization_.scaler() == nullptr) return {};
  if (!outcome_.has_value()) {
    return {optimization_.scaler()->scale(), optimization_.scaler()->scale()};
  }
  // One that cannot be halved any more stays: the next Step says so.
  LossScaler made = *optimization_.scaler(), skipped = *optimization_.scaler();
  (void)made.Update(/*overflow=*/false);
  (void)skipped.Update(/*overflow=*/outcome_->may_be_skipped());
  return {made.scale(), skipped.scale()};
}

Trainer::LossScales Trainer::KnownScales() {
  if (!Scales().known()) AwaitOutcome();
  return Scales();
}

// What autograd starts from, in the loss's dtype: undefined for 1. One that a
// half loss cannot hold is infinite there, and the step an overflow; without a
// loss scale nobody would see that: an error. A weight counts as what it is in
// that dtype.
at::Tensor Trainer::Seed(const at::Tensor& loss, MicroBatch* micro_batch) {
  TorchScope scope;
  const std::optional<double> weight = micro_batch->weight;
  const double share = weight.value_or(
      1.0 / static_cast<double>(config_.gradient_accumulation_steps()));
  const auto seed_on = [&](at::Device device, double scale) {
    return at::full(loss.sizes(), scale * share,
                    at::TensorOptions(at::kDouble).device(device))
        .to(loss.scalar_type());
  };
  // Not of the loss's device, whose forward it would wait for.
  const auto used = [&](double scale) {
    return seed_on(at::kCPU, scale).item().toDouble() / scale;
  };
  LossScales scales = Scales();
  if (!scales.known() &&
      (loss.device() != guard_->model().device() ||
       (weight.has_value() && used(scales.made) != used(scales.skipped)))) {
    scales = KnownScales();
  }
  if (scales.known() && scales.made * share == 1) return at::Tensor();
  if (weight.has_value()) {
    const double counts = used(scales.made);
    if (std::isfinite(counts)) {
      micro_batch->weight = counts;
    } else if (optimization_.scaler() == nullptr) {
      ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
          "Backward: a loss of ", c10::toString(loss.scalar_type()),
          " cannot be multiplied with the weight ", *weight,
          ", which is infinite in that dtype; compute the loss in float32")));
    }
  }
  const at::Tensor seed = seed_on(loss.device(), scales.made);
  if (scales.known()) return seed;
  return at::where(outcome_->Skipped(), seed_on(loss.device(), scales.skipped),
                   seed);
}

}  // namespace tessera
