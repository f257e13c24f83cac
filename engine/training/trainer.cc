#include "engine/training/trainer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/memory/heap.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "base/trace/trace.h"
#include "comm/all_gather_values.h"
#include "engine/parts/catch_announced.h"
#include "engine/parts/exclusive_scope.h"
#include "engine/parts/learning_rate.h"
#include "engine/parts/write_checks.h"
#include "engine/training/held_report.h"
#include "offload/update_stream.h"
#include "sharding/dispatch/saved_tensors.h"
#include "sharding/gradient/nested_graphs.h"
#include "sharding/partition/module_walk.h"
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

// zero_grad() of the module or of an optimizer does what ZeroGrad does, but in
// the middle of an accumulation: DeepSpeed's loops call it for each
// micro-batch, and no step would ever be made.
absl::Status Trainer::TakeZeroGrad() {
  TESSERA_ASSIGN_OR_RETURN(const bool zeroed,
                           parts_->gradients->WasZeroedByUser());
  if (!zeroed) return absl::OkStatus();
  if (micro_steps_ == 0) return ZeroGrad();
  return absl::FailedPreconditionError(
      absl::StrCat("zero_grad() was called after micro-batch ", micro_steps_,
                   " of the ", parts_->config.gradient_accumulation_steps(),
                   " of a step, and would drop their gradients; call it after "
                   "the last one's "
                   "Step only, or Engine::ZeroGrad to drop them"));
}

// libtorch's habit, one step() after n backwards, would be a micro-batch of n.
absl::Status Trainer::CheckEndOfMicroBatch() const {
  const int64_t count = parts_->config.gradient_accumulation_steps();
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
  if (parts_->settings.autocast_dtype.has_value() && !autocast_seen_) {
    return absl::FailedPreconditionError(
        "Backward: the configuration enables torch_autocast, but forward did "
        "not run within an Engine::AutocastScope");
  }
  return absl::OkStatus();
}

bool Trainer::ReducesNow() const {
  const bool last =
      micro_steps_ + 1 >= parts_->config.gradient_accumulation_steps();
  return no_sync_ == 0 && (last || !parts_->settings.accumulate_locally);
}

// To ask a tensor for its graph may throw: the backward will say why.
bool Trainer::MayNest(const at::Tensor& loss) const {
  if (!parts_->gradients->AnyUsedWithoutGrad() || !loss.defined()) return false;
  return CatchTorch("graph", [&] { return GraphMayNest(loss); }).value_or(true);
}

absl::Status Trainer::Backward(const at::Tensor& loss,
                               const BackwardOptions& options) {
  TESSERA_RETURN_IF_ERROR(parts_->CheckOpen());
  if (parts_->recomputed != nullptr) parts_->recomputed->EndForward();
  const RefusalReport refusals(parts_);
  tracer_.EndForward();
  if (observer_ != nullptr) observer_->EndForward();
  absl::Status status;
  {
    const StepMemory::PhaseScope phase(MemoryPhase::kBackward);
    const TraceScope trace(TraceTrack::kMain, "backward");
    status = refusals.In(RunBackward(loss, options));
  }
  tracer_.EndBackward();
  if (status.ok() && options.weight != 0.0) {
    watch_.AddLoss(loss, step_ + 1);
  }
  if (observer_ != nullptr) observer_->EndBackward();
  return status;
}

absl::Status Trainer::RunBackward(const at::Tensor& loss,
                                  const BackwardOptions& options) {
  absl::Status wrong = parts_->gradients->TakeLooks();
  wrong.Update(TakeZeroGrad());
  wrong.Update(parts_->CheckNotSummoned());
  wrong.Update(parts_->CheckNotAveraged());
  wrong.Update(
      CatchTorch("backward", [&] { return CheckBackward(loss, options); }));
  wrong = parts_->gradients->ChooseWeightUnit(wrong, options.weight);
  MicroBatch micro_batch;
  auto backward = [&] {
    ThrowIfError(wrong);
    loss.backward(Seed(loss, &micro_batch), options.retain_graph);
    if (observer_ != nullptr) observer_->EndAutograd();
    ThrowIfError(parts_->gradients->CheckAttached());
  };
  micro_batch.position = absl::StrCat(
      "optimizer step ", updates(), ", micro-batch ", micro_steps_,
      ", Backward ", parts_->gradients->num_reductions(), " of the step");
  micro_batch.reduce = ReducesNow();
  ScaleMicroBatch(options, &micro_batch);
  micro_batch.may_nest = MayNest(loss);
  StepEarly(options, &micro_batch);
  const bool keeps_heap =
      parts_->settings.keep_freed_heap && parts_->device().is_cpu();
  if (keeps_heap) ReturnFreedHeap();
  absl::Status status = parts_->gradients->Run(backward, micro_batch);
  ++backwards_;
  if (parts_->recomputed != nullptr) parts_->recomputed->EndBackward();
  parts_->schedule->EndPass();
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
    parts_->weighted = options.weight.has_value();
    ++step_backwards_;
  } else {
    losses_dropped_ = losses_dropped_ || (micro_batch.reduce && !reduced_);
    if (parts_->optimizer != nullptr) parts_->optimizer->DropEarly();
  }
  return status;
}

absl::StatusOr<bool> Trainer::AnyRankHasData(bool this_rank) {
  TESSERA_RETURN_IF_ERROR(parts_->CheckOpen());
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<uint8_t> all,
      AllGatherValue<uint8_t>(parts_->comm.get(), this_rank ? 1 : 0,
                              CommTag{"data left"}));
  return std::find(all.begin(), all.end(), 1) != all.end();
}

// A parameter registered since would be trained by nobody.
absl::Status Trainer::CheckParametersKnown() const {
  if (FingerprintOfParameters(*parts_->module) == parameters_fingerprint_) {
    return absl::OkStatus();
  }
  for (const auto& p : parts_->module->named_parameters()) {
    if (known_parameters_.contains(p.value().unsafeGetTensorImpl())) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "parameter '", p.key(),
        "' was registered after Engine::Create, which does not see it; Close() "
        "the engine and Create another"));
  }
  return absl::FailedPreconditionError(
      "some of the module's parameters were unregistered after Engine::Create; "
      "Close() the engine and Create another");
}

absl::Status Trainer::CheckStep() {
  TESSERA_RETURN_IF_ERROR(parts_->CheckOpen());
  TESSERA_RETURN_IF_ERROR(parts_->CheckNotSummoned());
  TESSERA_RETURN_IF_ERROR(parts_->CheckNotAveraged());
  TESSERA_RETURN_IF_ERROR(TakeZeroGrad());
  if (parts_->optimizer == nullptr) {
    return absl::FailedPreconditionError(
        "Step: the configuration has no optimizer");
  }
  if (!has_backward_) {
    return absl::FailedPreconditionError(
        "Step: no Engine::Backward since the last Step or zero_grad() (a bare "
        "loss.backward() leaves gradients that are not reduced)");
  }
  return absl::OkStatus();
}

// The same on all ranks.
absl::Status Trainer::CheckUpdate() {
  TESSERA_RETURN_IF_ERROR(CheckWrites(parts_));
  TESSERA_RETURN_IF_ERROR(CheckReplicas(parts_));
  if (!parts_->weighted.value_or(false) ||
      parts_->gradients->total_weight() != 0) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      "Step: no rank had data (every weight of the step is 0); ask "
      "Engine::AnyRankHasData before a forward, and call ZeroGrad to go on");
}

void Trainer::SetScheduledRate() {
  if (parts_->optimizer == nullptr) return;
  watch_.AddRate(step_);
  std::vector<OptimizerOptions> options = ScheduledOptions(*parts_, step_);
  report_.learning_rate = options[0].lr;
  report_.groups.clear();
  for (size_t g = 0; g < options.size(); ++g) {
    report_.groups.push_back({parts_->groups.names[g], options[g].lr});
  }
  parts_->optimizer->SetOptions(std::move(options));
}

absl::Status Trainer::UpdateParameters() {
  outcome_.reset();  // one that nobody has asked for
  one_backward_each_ =
      step_backwards_ == parts_->config.gradient_accumulation_steps();
  SetScheduledRate();
  parts_->gradients->Enter();
  absl::StatusOr<StepOutcome> made =
      StepShards(parts_->flats, parts_->gradients.get(), parts_->divisor(),
                 StepOptions(), parts_->optimizer.get(), parts_->comm.get());
  if (!made.ok() && parts_->optimizer->half_stepped()) {
    parts_->Lose(made.status());
  }
  TESSERA_RETURN_IF_ERROR(made.status());
  StepOutcome outcome = *std::move(made);
  step_at_most_ = ++step_;
  if (outcome.pending()) {
    outcome_ = std::move(outcome);
  } else {
    Report(*outcome.Take());
  }
  if (parts_->recomputed != nullptr) {
    report_.recompute = parts_->recomputed->TakeReport();
  }
  report_.loss_scale = parts_->scaler.has_value() ? parts_->scaler->scale() : 1;
  ReportOffload();
  return absl::OkStatus();
}

void Trainer::ReportOffload() {
  if (parts_->stream == nullptr) return;
  SwapStats disk;  // the host's copies are the device's to report
  if (parts_->stream->disk() != nullptr) disk = parts_->stream->disk()->stats();
  const UpdateStreamStats stream = parts_->stream->stats();
  const OffloadReport now = {disk.bytes_read,
                             disk.bytes_written,
                             disk.reading,
                             disk.writing,
                             stream.computing,
                             stream.stalled,
                             parts_->optimizer->early_units()};
  const OffloadReport before = std::exchange(offload_, now);
  report_.offload = {now.bytes_read - before.bytes_read,
                     now.bytes_written - before.bytes_written,
                     now.reading - before.reading,
                     now.writing - before.writing,
                     now.computing - before.computing,
                     now.stalled - before.stalled,
                     now.early_units - before.early_units};
}

// What is wrong before the update is agreed on where entering it is an
// agreement, and else announced: a step has one collective less then. Errors
// after that are either one rank's own, which fails the update, or found by all
// ranks, which end it as it is and may go on.
absl::Status Trainer::OptimizerStep() {
  TESSERA_RETURN_IF_ERROR(TakeOutcome());
  if (observer_ != nullptr) {
    observer_->Complete(report_, {step_, report_.skipped_steps, samples_});
  }
  absl::Status status = parts_->gradients->TakeLooks();
  if (status.ok()) status = parts_->gradients->CheckNothingPending();
  if (status.ok()) status = CheckParametersKnown();
  ExclusiveScope exclusive(parts_, "Step");
  const absl::Status entered = exclusive.Enter(status);
  if (!entered.ok()) return status.ok() ? entered : status;
  if (status.ok()) status = exclusive.Prepare();
  if (!status.ok()) return exclusive.Fail(status);  // others may wait for us
  status = CheckUpdate();
  if (!status.ok()) return exclusive.Commit(status);
  status = UpdateParameters();
  if (!status.ok()) return exclusive.Fail(status);
  TESSERA_RETURN_IF_ERROR(exclusive.Commit());
  EndStep();
  // The step is made, and the same on all ranks, whatever becomes of these.
  if (!outcome_.has_value()) status = JudgeOutcome();
  if (parts_->buffer_sync != nullptr) {
    status.Update(parts_->buffer_sync->Sync());
  }
  return status;
}

void Trainer::EndStep() {
  if (parts_->optimizer != nullptr) parts_->optimizer->DropEarly();
  parts_->gradients->Zero();
  has_backward_ = autocast_seen_ = false;
  parts_->weighted.reset();
  micro_steps_ = step_backwards_ = 0;
  EndKeptPeriod();
}

absl::Status Trainer::Step() {
  watch_.NoteStepCall();
  TESSERA_RETURN_IF_ERROR(CheckStep());
  if (observer_ != nullptr) observer_->BeginStep();
  if (micro_steps_ + 1 < parts_->config.gradient_accumulation_steps()) {
    ++micro_steps_;
    has_backward_ = autocast_seen_ = false;
    if (observer_ != nullptr) observer_->EndMicroBatch();
    return absl::OkStatus();
  }
  if (no_sync_ > 0) {
    return absl::FailedPreconditionError(
        "Step: within an Engine::NoSyncScope the gradients are not reduced; "
        "end it before the last Backward of the step");
  }
  const int64_t before = updates();
  const RefusalReport refusals(parts_);
  absl::Status status;
  {
    const StepMemory::PhaseScope phase(MemoryPhase::kStep);
    const TraceScope trace(TraceTrack::kMain, "optimizer step");
    status = refusals.In(CatchAnnounced(parts_->comm.get(), "Step",
                                        [&] { return OptimizerStep(); }));
  }
  if (updates() == before) return status;
  samples_ += parts_->config.train_batch_size();
  report_.memory = memory_.EndStep();
  tracer_.EndStep(step_at_most_, updates());
  if (observer_ != nullptr) {
    observer_->EndStep(updates(), step_at_most_, samples_, report_.memory);
  }
  return status;
}

absl::Status Trainer::ZeroGrad() {
  TESSERA_RETURN_IF_ERROR(parts_->CheckOpen());
  if (parts_->recomputed != nullptr) parts_->recomputed->EndForward();
  ReleaseNodePins();
  if (step_backwards_ > 0) foreseen_ = false;
  if (observer_ != nullptr) observer_->DropStep();
  EndStep();
  return absl::OkStatus();
}

void Trainer::NoteParameters() {
  for (const at::Tensor& p : parts_->module->parameters()) {
    known_parameters_.insert(p.unsafeGetTensorImpl());
  }
  parameters_fingerprint_ = FingerprintOfParameters(*parts_->module);
}

absl::Status Trainer::CheckAtBoundary() {
  TESSERA_RETURN_IF_ERROR(CheckNotFailed());
  TESSERA_RETURN_IF_ERROR(parts_->CheckNotAveraged());
  if (!has_backward_ && micro_steps_ == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "in the middle of a step; save after Step at an accumulation boundary");
}

absl::Status Trainer::Resume(const std::optional<RunPlace>& place) {
  TESSERA_RETURN_IF_ERROR(ZeroGrad());
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
