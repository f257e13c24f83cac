// One step, in the order in which it is made (OptimizerStep):
//
//   outcome of the last step; what is wrong before this one
//   no rank uses parameters any more   (engine/model/exclusive_scope.h)
//   rates and divisor of this step; histograms of what it works on
//   norm and clipping, then unit by unit the update, and its new values to all
//   ranks                              (optim/sharded_step.h)
//   parameters may be used again
//   counts, reports, warnings          (CountStep; trainer_outcome.cc)
//
// Where errors go. What is wrong before the update is agreed on where entering
// it is an agreement, and else announced: a step has one collective less then.
// Errors after that are either one rank's own, which fails the update, or found
// by all ranks, which end it as it is and may go on.
#include <utility>

#include "base/memory/memory.h"
#include "base/status.h"
#include "base/trace/trace.h"
#include "comm/catch_announced.h"
#include "config/config.pb.h"
#include "engine/model/exclusive_scope.h"
#include "engine/train/held_report.h"
#include "engine/train/trainer.h"
#include "offload/update_stream.h"
#include "sharding/dispatch/saved_tensors.h"

namespace tessera {

absl::Status Trainer::CheckStep() {
  TESSERA_RETURN_IF_ERROR(guard_->life().CheckUsable());
  TESSERA_RETURN_IF_ERROR(guard_->life().CheckNotSummoned());
  TESSERA_RETURN_IF_ERROR(guard_->life().CheckNotAveraged());
  // zero_grad() finds no gradients where they have been used.
  if (!guard_->life().half_stepped()) TESSERA_RETURN_IF_ERROR(TakeZeroGrad());
  if (optimization_.optimizer() == nullptr) {
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

absl::Status Trainer::Step() {
  watch_.NoteStepCall();
  TESSERA_RETURN_IF_ERROR(CheckStep());
  if (observer_ != nullptr) observer_->BeginStep();
  if (micro_steps_ + 1 < config_.gradient_accumulation_steps()) {
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
  const RefusalReport refusals(&guard_->model(), &optimization_, plan_);
  absl::Status status;
  {
    const StepMemory::PhaseScope phase(MemoryPhase::kStep);
    const TraceScope trace(TraceTrack::kMain, "optimizer step");
    status = refusals.In(CatchAnnounced(guard_->comm(), "Step",
                                        [&] { return OptimizerStep(); }));
  }
  if (updates() == before) return status;
  samples_ += config_.train_batch_size();
  report_.memory = memory_.EndStep();
  tracer_.EndStep(step_at_most_, updates());
  if (observer_ != nullptr) {
    observer_->EndStep(updates(), step_at_most_, samples_, report_.memory);
  }
  return status;
}

absl::Status Trainer::OptimizerStep() {
  TESSERA_RETURN_IF_ERROR(TakeOutcome());
  if (observer_ != nullptr) {
    observer_->Complete(report_, {step_, report_.skipped_steps, samples_});
  }
  watch_.AddRate(step_);
  const ShardedStepOptions options = StepOptions();
  const absl::Status known = known_parameters_.Check(guard_->model().module());
  Gradients& gradients = *optimization_.gradients();
  absl::Status status = gradients.TakeLooks();
  status.Update(gradients.CheckNothingPending());
  status.Update(known);
  gradients.Enter();

  ExclusiveScope exclusive(guard_, "Step");
  const absl::Status entered = exclusive.Enter(status);
  if (!entered.ok()) return status.ok() ? entered : status;
  if (status.ok()) status = exclusive.Prepare();
  if (!status.ok()) return exclusive.Fail(status);  // others may wait for us
  status = writes_.CheckBeforeStep();
  status.Update(optimization_.CheckHasSamples());
  const double divisor = optimization_.divisor();
  if (status.ok() && observer_ != nullptr) {
    status = observer_->AddHistograms(step_ + 1, gradients, divisor);
  }
  if (!status.ok()) return exclusive.Commit(status);

  outcome_.reset();  // one that nobody has asked for
  const std::vector<OptimizerOptions> scheduled = groups_.Scheduled(step_);
  ShardedOptimizer& optimizer = *optimization_.optimizer();
  optimizer.SetOptions(scheduled);
  absl::StatusOr<StepOutcome> outcome =
      StepShards(guard_->model().flats(), &gradients, divisor, options,
                 &optimizer, guard_->comm());
  if (!outcome.ok()) {
    if (optimizer.half_stepped()) guard_->life().Lose(outcome.status());
    return exclusive.Fail(outcome.status());
  }
  status = exclusive.Commit();
  if (status.ok()) optimization_.EndStep();

  CountStep(scheduled, *std::move(outcome));
  TESSERA_RETURN_IF_ERROR(status);
  BeginNextStep();
  // The step is made, and the same on all ranks, whatever becomes of these.
  if (!outcome_.has_value()) status = JudgeOutcome();
  if (buffer_sync_ != nullptr) status.Update(buffer_sync_->Sync());
  return status;
}

void Trainer::CountStep(const std::vector<OptimizerOptions>& options,
                        StepOutcome outcome) {
  step_at_most_ = ++step_;
  one_backward_each_ = step_backwards_ == config_.gradient_accumulation_steps();
  report_.learning_rate = options[0].lr;
  report_.groups.clear();
  for (size_t g = 0; g < options.size(); ++g) {
    report_.groups.push_back({groups_.groups().names[g], options[g].lr});
  }
  if (outcome.pending()) {
    outcome_ = std::move(outcome);
  } else {
    Report(*outcome.Take());
  }
  if (recomputed_ != nullptr) {
    report_.recompute = recomputed_->TakeReport();
  }
  report_.loss_scale = optimization_.loss_scale();
  report_.pipeline = std::exchange(pipeline_, {});
  ReportOffload();
}

void Trainer::BeginNextStep() {
  has_backward_ = autocast_seen_ = false;
  micro_steps_ = step_backwards_ = 0;
  EndHalfStepped();
  EndKeptPeriod();
}

void Trainer::ReportOffload() {
  UpdateStream* const stream = guard_->stream().get();
  if (stream == nullptr) return;
  SwapStats disk;  // the host's copies are the device's to report
  if (stream->disk() != nullptr) disk = stream->disk()->stats();
  const UpdateStreamStats stats = stream->stats();
  const OffloadReport now = {
      .bytes_read = disk.bytes_read,
      .bytes_written = disk.bytes_written,
      .reading = disk.reading,
      .writing = disk.writing,
      .computing = stats.computing,
      .stalled = stats.stalled,
      .early_units = optimization_.optimizer()->early().units()};
  const OffloadReport before = std::exchange(offload_, now);
  report_.offload = {.bytes_read = now.bytes_read - before.bytes_read,
                     .bytes_written = now.bytes_written - before.bytes_written,
                     .reading = now.reading - before.reading,
                     .writing = now.writing - before.writing,
                     .computing = now.computing - before.computing,
                     .stalled = now.stalled - before.stalled,
                     .early_units = now.early_units - before.early_units};
}

absl::Status Trainer::ZeroGrad() {
  TESSERA_RETURN_IF_ERROR(guard_->life().CheckOpen());
  if (recomputed_ != nullptr) recomputed_->EndForward();
  ReleaseNodePins();
  if (step_backwards_ > 0) as_expected_ = false;
  if (observer_ != nullptr) observer_->DropStep();
  DropEarly();
  optimization_.EndStep();
  BeginNextStep();
  return absl::OkStatus();
}

}  // namespace tessera
