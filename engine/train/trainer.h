// Trainer: carries out Backward and Step of an engine, and keeps the state
// between them: the micro-batch and step that it is in, their weights, and the
// outcome of the last step. engine/engine.h documents the calls that Engine has
// under the same name.
//
//   Backward  gradients, reduced                      (sharding/gradient)
//   Step      within an ExclusiveScope: checks of what the user wrote, norm and
//             update, new values to all ranks         (optim/sharded_step.h)
//
// On devices a Step may not know its outcome when it returns
// (trainer_outcome.cc); calls that depend on the outcome call AwaitOutcome.
#ifndef ENGINE_TRAIN_TRAINER_H_
#define ENGINE_TRAIN_TRAINER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/api/engine_types.h"
#include "engine/api/run_place.h"
#include "engine/build/buffer_sync.h"
#include "engine/build/settings.h"
#include "engine/model/optimization.h"
#include "engine/model/optimizer_groups.h"
#include "engine/model/update_guard.h"
#include "engine/model/write_checks.h"
#include "engine/observe/step_observer.h"
#include "engine/train/known_parameters.h"
#include "engine/train/run_watch.h"
#include "engine/train/step_memory_reporter.h"
#include "engine/train/step_tracer.h"
#include "optim/gradients/non_finite.h"
#include "optim/sharded_step.h"
#include "optim/step_outcome.h"
#include "sharding/recompute/recomputed_units.h"

namespace tessera {

class Trainer {
 public:
  // All of these outlive the Trainer.
  struct Needs {
    UpdateGuard* guard = nullptr;
    Optimization* optimization = nullptr;
    OptimizerGroups* groups = nullptr;
    WriteChecks* writes = nullptr;
    const proto::Config* config = nullptr;  // resolved
    const Settings* settings = nullptr;  // made of `config`, complete at Begin
    const PlanReport* plan = nullptr;    // null: there is none
  };
  explicit Trainer(const Needs& needs);

  // Set the modules whose activations are recomputed, and the synchronization
  // of buffers after a step. Call these before the first forward.
  void SetRecomputed(std::unique_ptr<RecomputedUnits> recomputed) {
    recomputed_ = std::move(recomputed);
  }
  void SetBufferSync(std::unique_ptr<BufferSync> sync) {
    buffer_sync_ = std::move(sync);
  }
  // Begin is called when Create has ended, Detach when the engine trains no
  // more.
  void Begin() {
    memory_.Begin();
    tracer_.Begin();
  }
  void Detach() {
    recomputed_.reset();
    memory_.End();
    tracer_.End();
  }

  // Sets what the micro-batches of the step took, for its report.
  void SetPipelineReport(const PipelineReport& report) { pipeline_ = report; }
  // Says that a forward has ended whose Backward may come after others.
  void EndForward() {
    if (recomputed_ != nullptr) recomputed_->EndForward();
  }
  // `forward`: how the forward has ended; its error is Backward's, on all
  // ranks.
  absl::Status Backward(const at::Tensor& loss, const BackwardOptions& options,
                        const absl::Status& forward = absl::OkStatus());
  absl::Status Step();
  absl::Status ZeroGrad();
  absl::Status SetOption(absl::string_view group, absl::string_view option,
                         double value) {
    return groups_.SetOption(group, option, value, step_);
  }
  absl::Status SetFrozen(absl::string_view group, bool frozen) {
    return groups_.SetFrozen(group, frozen, has_backward_ || micro_steps_ > 0);
  }
  absl::StatusOr<bool> AnyRankHasData(bool this_rank);
  absl::StatusOr<std::vector<NonFiniteGradient>> NonFiniteGradients();

  // Notes the module's parameters: a Step with other parameters is refused.
  // LOCAL.
  void NoteParameters() { known_parameters_.Note(guard_->model().module()); }
  void ChangeNoSync(int by) { no_sync_ += by; }
  void NoteAutocast() { autocast_seen_ = true; }
  // Returns whether it was noted since the last call or Step: forwards of
  // several micro-batches may run before the first Backward.
  bool TakeAutocast() { return std::exchange(autocast_seen_, false); }
  void NoteManaged() { watch_.NoteManaged(); }
  // Returns FailedPrecondition in the middle of a step, or CheckNotFailed's
  // error.
  absl::Status CheckAtBoundary();
  // Returns where the run is, once the last step is settled. LOCAL.
  RunPlace place() {
    AwaitOutcome();
    return {step_, report_.skipped_steps, samples_};
  }
  // Resumes after a checkpoint was loaded, at the place where it was saved;
  // unset: only its values were loaded. LOCAL.
  absl::Status Resume(const std::optional<RunPlace>& place);

  // Learns the outcome of the last step, waiting for the device if necessary.
  // Everything in the engine that depends on it is up to date then. LOCAL.
  void AwaitOutcome();
  // Returns the last step's error if no call has returned it yet; all ranks
  // have the same. Calls AwaitOutcome. LOCAL.
  absl::Status TakeUntold();
  // Returns the error that made the last step fail for good, so that values
  // cannot be trusted. Calls AwaitOutcome. LOCAL.
  absl::Status CheckNotFailed();
  // Returns whether it is known that CheckNotFailed returns an error. LOCAL,
  // never waits.
  bool has_failed() const { return !failed_.ok(); }
  // Returns step() as if the last step was not skipped; identical on all ranks,
  // also where only some have settled. LOCAL, never waits.
  int64_t step_at_most() const { return step_at_most_; }
  // Returns the number of optimizer steps made or skipped. LOCAL, never waits.
  int64_t updates() const { return step_ + report_.skipped_steps; }
  // Whether the program has called Step.
  bool step_called() const { return watch_.step_called(); }

  // Gives the last warnings when the engine ends. REQUIRES: all of Needs still
  // exists. LOCAL; with `wait`, waits for the device.
  void End(bool wait) {
    watch_.TellLoss(wait);
    watch_.End();
  }

  // Sets the observer, which outlives all calls here; null: there is none.
  void SetObserver(StepObserver* observer) { observer_ = observer; }
  StepMemoryReporter& memory() { return memory_; }
  // Both call AwaitOutcome. LOCAL.
  int64_t step() {
    AwaitOutcome();
    return step_;  // optimizer steps done
  }
  const StepReport& last_step() {
    AwaitOutcome();
    return report_;
  }

 private:
  absl::Status TakeZeroGrad();
  absl::Status CheckBackward(const at::Tensor& loss,
                             const BackwardOptions& options);
  absl::Status CheckWeight(const BackwardOptions& options) const;
  absl::Status CheckEndOfMicroBatch() const;
  // Whether the next loss belongs to the micro-batch of the last Backward.
  bool IsAnotherLoss() const {
    return has_backward_ && more_losses_ && !losses_dropped_;
  }
  bool ReducesNow() const;
  bool MayNest(const at::Tensor& loss) const;
  // The next loss scale, if the last step was taken and if it was skipped.
  struct LossScales {
    double made = 1, skipped = 1;
    bool known() const { return made == skipped; }
  };
  LossScales Scales() const;
  LossScales KnownScales();
  void ScaleMicroBatch(const BackwardOptions& options, MicroBatch* micro_batch);
  at::Tensor Seed(const at::Tensor& loss, MicroBatch* micro_batch);
  void AllowEarlySteps(const BackwardOptions& options, MicroBatch* micro_batch);
  // trainer_in_backward.cc
  absl::Status CheckReducesInBackward() const;
  absl::Status CheckStepsInBackward(const BackwardOptions& options) const;
  void StepInBackward(MicroBatch* micro_batch);
  absl::Status EndStepsInBackward(const absl::Status& backward);
  void EndHalfStepped();
  absl::Status CheckStep();
  void DropEarly() {
    if (optimization_.optimizer() != nullptr) {
      optimization_.optimizer()->early().Drop();
    }
  }
  ShardedStepOptions StepOptions() const;
  void Report(const ShardedStepResult& result);
  absl::Status JudgeOutcome();
  absl::Status TakeOutcome();
  absl::Status RunBackward(const at::Tensor& loss,
                           const BackwardOptions& options,
                           const absl::Status& forward);
  // trainer_step.cc
  absl::Status OptimizerStep();
  void CountStep(const std::vector<OptimizerOptions>& options,
                 StepOutcome outcome);
  void BeginNextStep();
  void ReportOffload();

  UpdateGuard* const guard_;
  Optimization& optimization_;
  OptimizerGroups& groups_;
  WriteChecks& writes_;
  const proto::Config& config_;
  const Settings& settings_;
  const PlanReport* const plan_;
  std::unique_ptr<RecomputedUnits> recomputed_;  // null: nothing is
  // Null: each rank has its own buffers.
  std::unique_ptr<BufferSync> buffer_sync_;
  KnownParameters known_parameters_;
  StepReport report_;
  // The last step's outcome, while it is not known yet: step_ and report_
  // assume that it was not skipped, and the scale is still the old one.
  std::optional<StepOutcome> outcome_;
  absl::Status untold_;  // error of a step that had returned: for the next Step
                         // to return
  absl::Status
      failed_;  // error of such a step after which training cannot go on
  RunWatch watch_;
  StepMemoryReporter memory_;
  StepTracer tracer_;
  StepObserver* observer_ = nullptr;
  PipelineReport pipeline_;       // of the step's micro-batches
  OffloadReport offload_;         // since Create, when the last step was made
  int no_sync_ = 0;               // NoSyncScopes
  bool autocast_seen_ = false;    // since the last Step
  bool loss_compared_ = false;    // with those of the tensor-parallel group
  bool has_backward_ = false;     // since the last Step
  bool more_losses_ = false;      // as the last Backward said
  std::optional<double> weight_;  // the last Backward's
  bool reduced_ = false;          // the last Backward reduced
  // A failed Backward has dropped what the last one had left on this rank.
  bool losses_dropped_ = false;
  int64_t backwards_ = 0;       // since Create
  int64_t step_backwards_ = 0;  // since the last optimizer step
  // In the last optimizer step each micro-batch had one Backward.
  bool one_backward_each_ = false;
  // Whether the last step went as early steps expect the next one to go;
  // absent: there was no step.
  std::optional<bool> as_expected_;
  int64_t micro_steps_ = 0;  // Steps since the last optimizer step
  int64_t step_ = 0;
  int64_t step_at_most_ = 0;
  int64_t samples_ = 0;  // so far, of all ranks, of steps made or skipped
};

}  // namespace tessera
#endif  // ENGINE_TRAIN_TRAINER_H_
