// Trainer: Backward and Step of an engine, and the bookkeeping between them: in
// which micro-batch of which step it is, with what weights, and what became of
// the last step. What each call does and returns is said with Engine's of the
// same name (engine/engine.h).
//
//   Backward  gradients, reduced                      (sharding/gradient)
//   Step      within an ExclusiveScope: checks of what the user wrote, norm and
//             update, new values to all ranks         (optim/sharded_step.h)
//
// On devices a Step may not know yet what came of it (trainer_outcome.cc); who
// asks, or depends on it, calls Settle.
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
  // All of these outlive it.
  struct Needs {
    UpdateGuard* guard = nullptr;
    Optimization* optimization = nullptr;
    OptimizerGroups* groups = nullptr;
    WriteChecks* writes = nullptr;
    const proto::Config* config = nullptr;  // resolved
    const Settings* settings = nullptr;     // of it, known in full at Begin
    const PlanReport* plan = nullptr;       // null: there is none
  };
  explicit Trainer(const Needs& needs);

  // Modules whose activations are computed again; buffers that are averaged
  // after a step. Before the first forward.
  void SetRecomputed(std::unique_ptr<RecomputedUnits> recomputed) {
    recomputed_ = std::move(recomputed);
  }
  void SetBufferSync(std::unique_ptr<BufferSync> sync) {
    buffer_sync_ = std::move(sync);
  }
  // Create has ended, and the engine trains no more.
  void Begin() {
    memory_.Begin();
    tracer_.Begin();
  }
  void Detach() {
    recomputed_.reset();
    memory_.End();
    tracer_.End();
  }

  absl::Status Backward(const at::Tensor& loss, const BackwardOptions& options);
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

  // The module's parameters as they are now: a Step with others is refused.
  // LOCAL.
  void NoteParameters() { known_parameters_.Note(guard_->model().module()); }
  void ChangeNoSync(int by) { no_sync_ += by; }
  void NoteAutocast() { autocast_seen_ = true; }
  // FailedPrecondition in the middle of a step, or as CheckNotFailed.
  absl::Status CheckAtBoundary();
  // Waits as Settle. LOCAL.
  RunPlace place() {
    Settle();
    return {step_, report_.skipped_steps, samples_};
  }
  // Goes on from a checkpoint that has been loaded, where it was saved; unset:
  // of which the values alone were loaded. LOCAL.
  absl::Status Resume(const std::optional<RunPlace>& place);

  // The outcome of the last step is known: where it was not, waits for the
  // device to say. Everything of an engine that depends on it is right then.
  // LOCAL.
  void Settle();
  // What the last step had to say, if nothing has told it yet: an error that
  // all ranks have. LOCAL. Waits as Settle.
  absl::Status TakeUntold();
  // What has failed the last step for good, so that values are not to be
  // trusted. LOCAL. Waits as Settle.
  absl::Status CheckNotFailed();
  // The number that step() has, if the last step was not skipped; the same on
  // all ranks, whoever has settled. LOCAL, waits for nothing.
  int64_t step_at_most() const { return step_at_most_; }
  // Optimizer steps made or skipped. LOCAL, waits for nothing.
  int64_t updates() const { return step_ + report_.skipped_steps; }

  // The engine goes: says what is to be said of that. REQUIRES: what the parts
  // hold is still there. LOCAL; with `wait`, waits for the device.
  void End(bool wait) {
    watch_.TellLoss(wait);
    watch_.End();
  }

  // Null: nobody looks on. It outlives all calls here.
  void SetObserver(StepObserver* observer) { observer_ = observer; }
  StepMemoryReporter& memory() { return memory_; }
  // Both wait as Settle. LOCAL.
  int64_t step() {
    Settle();
    return step_;  // optimizer steps done
  }
  const StepReport& last_step() {
    Settle();
    return report_;
  }

 private:
  absl::Status TakeZeroGrad();
  absl::Status CheckBackward(const at::Tensor& loss,
                             const BackwardOptions& options);
  absl::Status CheckWeight(const BackwardOptions& options) const;
  absl::Status CheckEndOfMicroBatch() const;
  // Of the micro-batch of the Backward before.
  bool IsAnotherLoss() const {
    return has_backward_ && more_losses_ && !losses_dropped_;
  }
  bool ReducesNow() const;
  bool MayNest(const at::Tensor& loss) const;
  // Of the next loss: what it is where the last step was made, and where it was
  // skipped.
  struct LossScales {
    double made = 1, skipped = 1;
    bool known() const { return made == skipped; }
  };
  LossScales Scales() const;
  LossScales SettledScales();
  void ScaleMicroBatch(const BackwardOptions& options, MicroBatch* micro_batch);
  at::Tensor Seed(const at::Tensor& loss, MicroBatch* micro_batch);
  void StepEarly(const BackwardOptions& options, MicroBatch* micro_batch);
  absl::Status CheckStep();
  absl::Status CheckUpdate();
  void DropEarly() {
    if (optimization_.optimizer() != nullptr) {
      optimization_.optimizer()->early().Drop();
    }
  }
  void SetScheduledRate();
  ShardedStepOptions StepOptions() const;
  absl::Status UpdateParameters();
  void Report(const ShardedStepResult& result);
  absl::Status JudgeOutcome();
  absl::Status TakeOutcome();
  absl::Status RunBackward(const at::Tensor& loss,
                           const BackwardOptions& options);
  absl::Status OptimizerStep();
  void EndStep();
  void ReportOffload();

  UpdateGuard* const guard_;
  Optimization& optimization_;
  OptimizerGroups& groups_;
  WriteChecks& writes_;
  const proto::Config& config_;
  const Settings& settings_;
  const PlanReport* const plan_;
  std::unique_ptr<RecomputedUnits> recomputed_;  // null: nothing is
  // Null: buffers are each rank's own.
  std::unique_ptr<BufferSync> buffer_sync_;
  KnownParameters known_parameters_;
  StepReport report_;
  // Of the last step, while it is not known: step_ and report_ are what they
  // are if it was not skipped, and the scale is that of before.
  std::optional<StepOutcome> outcome_;
  absl::Status untold_;  // of a step that had returned: the next Step's
  absl::Status failed_;  // the same, after which nothing goes on
  RunWatch watch_;
  StepMemoryReporter memory_;
  StepTracer tracer_;
  StepObserver* observer_ = nullptr;
  OffloadReport offload_;         // since Create, when the last step was made
  int no_sync_ = 0;               // NoSyncScopes
  bool autocast_seen_ = false;    // since the last Step
  bool has_backward_ = false;     // since the last Step
  bool more_losses_ = false;      // as the last Backward said
  std::optional<double> weight_;  // the last Backward's
  bool reduced_ = false;          // so was the last Backward
  // What it had left on this rank was dropped since, by one that failed.
  bool losses_dropped_ = false;
  int64_t backwards_ = 0;       // since Create
  int64_t step_backwards_ = 0;  // since the last optimizer step
  // In the last optimizer step.
  bool one_backward_each_ = false;
  // The last step went as early steps expect the next one to go; absent: there
  // was none.
  std::optional<bool> foreseen_;
  int64_t micro_steps_ = 0;  // Steps since the last optimizer step
  int64_t step_ = 0;
  int64_t step_at_most_ = 0;
  int64_t samples_ = 0;  // so far, of all ranks, of steps made or skipped
};

}  // namespace tessera
#endif  // ENGINE_TRAIN_TRAINER_H_
