#include "engine/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/memory/heap.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "base/trace/trace.h"
#include "comm/all_gather_values.h"
#include "config/config.pb.h"
#include "engine/model/part_values.h"
#include "engine/train/held_report.h"
#include "sharding/dispatch/saved_tensors.h"
#include "sharding/gradient/nested_graphs.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

// Backwards after which what the heap has freed stays.
constexpr int64_t kFirstBackwards = 2;

absl::Status CheckLoss(const at::Tensor& loss) {
  if (!loss.defined()) {
    return absl::InvalidArgumentError("Backward: the loss is undefined");
  }
  if (loss.numel() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("Backward: expected a loss of one element, got ",
                     loss.numel(), "; take its mean or sum"));
  }
  if (!loss.requires_grad()) {
    return absl::InvalidArgumentError(
        "Backward: the loss does not require a gradient (was the forward run "
        "under NoGradGuard, or are all parameters frozen?)");
  }
  return absl::OkStatus();
}

}  // namespace

Trainer::Trainer(const Needs& needs)
    : guard_(needs.guard),
      optimization_(*needs.optimization),
      groups_(*needs.groups),
      writes_(*needs.writes),
      config_(*needs.config),
      settings_(*needs.settings),
      plan_(needs.plan),
      watch_(&guard_->model(), &optimization_, groups_.schedule(), &config_,
             settings_.step.skip_on_overflow),
      memory_(&guard_->model(), &config_),
      tracer_(&guard_->model(), &config_) {}

// zero_grad() of the module or of an optimizer does what ZeroGrad does, but in
// the middle of an accumulation: DeepSpeed's loops call it for each
// micro-batch, and no step would ever be made.
absl::Status Trainer::TakeZeroGrad() {
  TESSERA_ASSIGN_OR_RETURN(const bool zeroed,
                           optimization_.gradients()->WasZeroedByUser());
  if (!zeroed) return absl::OkStatus();
  if (micro_steps_ == 0) return ZeroGrad();
  return absl::FailedPreconditionError(
      absl::StrCat("zero_grad() was called after micro-batch ", micro_steps_,
                   " of the ", config_.gradient_accumulation_steps(),
                   " of a step, and would drop their gradients; call it after "
                   "the last one's "
                   "Step only, or Engine::ZeroGrad to drop them"));
}

// libtorch's habit, one step() after n backwards, would be a micro-batch of n.
absl::Status Trainer::CheckEndOfMicroBatch() const {
  const int64_t count = config_.gradient_accumulation_steps();
  if (count == 1 || !has_backward_ || more_losses_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "Backward: the second one since the last Step, and "
      "gradient_accumulation_steps is ",
      count, "; call Step after each Backward (every ", count,
      "th makes an optimizer step), or set BackwardOptions::more_losses if "
      "this "
      "is another loss of the same micro-batch, or accumulate by hand with "
      "gradient_accumulation_steps 1"));
}

absl::Status Trainer::CheckBackward(const at::Tensor& loss,
                                    const BackwardOptions& options) {
  TESSERA_RETURN_IF_ERROR(CheckEndOfMicroBatch());
  TESSERA_RETURN_IF_ERROR(CheckLoss(loss));
  TESSERA_RETURN_IF_ERROR(CheckWeight(options));
  TESSERA_RETURN_IF_ERROR(CheckStepsInBackward(options));
  if (settings_.autocast_dtype.has_value() && !autocast_seen_) {
    return absl::FailedPreconditionError(
        "Backward: the configuration enables torch_autocast, but forward did "
        "not run within an Engine::AutocastScope");
  }
  return absl::OkStatus();
}

bool Trainer::ReducesNow() const {
  const bool last = micro_steps_ + 1 >= config_.gradient_accumulation_steps();
  return no_sync_ == 0 &&
         (last || config_.sharding().accumulation() != "local");
}

// To ask a tensor for its graph may throw: the backward will say why.
bool Trainer::MayNest(const at::Tensor& loss) const {
  const Gradients& gradients = *optimization_.gradients();
  if (!gradients.AnyUsedWithoutGrad() || !loss.defined()) return false;
  return CatchTorch("graph", [&] { return GraphMayNest(loss); }).value_or(true);
}

absl::Status Trainer::Backward(const at::Tensor& loss,
                               const BackwardOptions& options,
                               const absl::Status& forward) {
  TESSERA_RETURN_IF_ERROR(guard_->life().CheckOpen());
  TESSERA_RETURN_IF_ERROR(CheckReducesInBackward());
  if (recomputed_ != nullptr) recomputed_->EndForward();
  const RefusalReport refusals(&guard_->model(), &optimization_, plan_);
  tracer_.EndForward();
  if (observer_ != nullptr) observer_->EndForward();
  absl::Status status;
  {
    const StepMemory::PhaseScope phase(MemoryPhase::kBackward);
    const TraceScope trace(TraceTrack::kMain, "backward");
    status =
        refusals.In(EndStepsInBackward(RunBackward(loss, options, forward)));
  }
  tracer_.EndBackward();
  if (status.ok() && options.weight != 0.0) {
    watch_.AddLoss(loss, step_ + 1);
  }
  if (observer_ != nullptr) observer_->EndBackward();
  return status;
}

absl::Status Trainer::RunBackward(const at::Tensor& loss,
                                  const BackwardOptions& options,
                                  const absl::Status& forward) {
  absl::Status wrong = optimization_.gradients()->TakeLooks();
  wrong.Update(forward);
  wrong.Update(TakeZeroGrad());
  wrong.Update(guard_->life().CheckNotSummoned());
  wrong.Update(guard_->life().CheckNotAveraged());
  wrong.Update(
      CatchTorch("backward", [&] { return CheckBackward(loss, options); }));
  wrong = optimization_.gradients()->ChooseWeightUnit(wrong, options.weight);
  MicroBatch micro_batch;
  auto backward = [&] {
    ThrowIfError(wrong);
    // A device would have to be waited for: there the first one is compared.
    if (loss.is_cpu() || !loss_compared_) {
      ThrowIfError(CheckSameLoss(guard_->model(), loss, options.weight));
      if (!std::exchange(loss_compared_, true)) WarnIfWhole(guard_->model());
    }
    loss.backward(Seed(loss, &micro_batch), options.retain_graph);
    if (observer_ != nullptr) observer_->EndAutograd();
    ThrowIfError(optimization_.gradients()->CheckAttached());
  };
  micro_batch.position =
      absl::StrCat("optimizer step ", updates(), ", micro-batch ", micro_steps_,
                   ", Backward ", optimization_.gradients()->num_reductions(),
                   " of the step");
  micro_batch.reduce = ReducesNow();
  ScaleMicroBatch(options, &micro_batch);
  micro_batch.may_nest = MayNest(loss);
  AllowEarlySteps(options, &micro_batch);
  const bool keeps_heap =
      config_.sharding().keep_freed_heap() && guard_->model().device().is_cpu();
  if (keeps_heap) ReturnFreedHeap();
  absl::Status status = optimization_.gradients()->Run(backward, micro_batch);
  ++backwards_;
  if (recomputed_ != nullptr) recomputed_->EndBackward();
  guard_->model().schedule()->EndPass();
  if (keeps_heap && backwards_ >= kFirstBackwards) KeepFreedHeap();
  if (status.ok()) {
    if (observer_ != nullptr) {
      observer_->AddLoss(loss, options.weight, micro_batch.another_loss);
    }
    has_backward_ = true;
    more_losses_ = options.more_losses;
    weight_ = options.weight;
    reduced_ = micro_batch.reduce;
    losses_dropped_ = false;
    optimization_.SetWeighted(options.weight.has_value());
    ++step_backwards_;
  } else {
    losses_dropped_ = losses_dropped_ || (micro_batch.reduce && !reduced_);
    DropEarly();
  }
  return status;
}

absl::StatusOr<bool> Trainer::AnyRankHasData(bool this_rank) {
  TESSERA_RETURN_IF_ERROR(guard_->life().CheckOpen());
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<uint8_t> all,
      AllGatherValue<uint8_t>(guard_->model().data(), this_rank ? 1 : 0,
                              CommTag{"data left"}));
  return std::find(all.begin(), all.end(), 1) != all.end();
}

absl::Status Trainer::CheckAtBoundary() {
  TESSERA_RETURN_IF_ERROR(CheckNotFailed());
  TESSERA_RETURN_IF_ERROR(guard_->life().CheckNotAveraged());
  if (!has_backward_ && micro_steps_ == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "in the middle of a step; save after Step at an accumulation boundary");
}

absl::Status Trainer::Resume(const std::optional<RunPlace>& place) {
  TESSERA_RETURN_IF_ERROR(ZeroGrad());
  loss_compared_ = false;
  if (!place.has_value()) return absl::OkStatus();
  outcome_.reset();  // of other values, as what it had to say
  failed_ = untold_ = absl::OkStatus();
  watch_.Restart();
  step_ = step_at_most_ = place->step;
  report_.skipped_steps = place->skipped_steps;
  samples_ = place->samples;
  return absl::OkStatus();
}

}  // namespace tessera
