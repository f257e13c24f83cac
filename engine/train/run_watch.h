// RunWatch: what goes wrong in a run without an error of any call, told once
// each, in a warning: a loss that is not finite, one of 16 bits, a step that
// was skipped, a learning rate that rises again, an engine that never steps.
// And what is an error in the end: steps that are all skipped.
//
// Nothing of it waits for a device. A loss there is copied to the host behind
// the forward that made it, and looked at when it has come; one look is under
// way at a time, so some losses are not looked at, but the last one is: one
// that is not finite makes those after it the same, or its step is skipped.
//
// Threads: outside order.
#ifndef ENGINE_TRAIN_RUN_WATCH_H_
#define ENGINE_TRAIN_RUN_WATCH_H_

#include <cstdint>
#include <memory>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "engine/api/engine_types.h"
#include "engine/model/optimization.h"
#include "engine/model/sharded_model.h"
#include "optim/schedule/lr_schedule.h"

namespace tessera {

namespace proto {
class Config;
}

class RunWatch {
 public:
  // All of these outlive it. `schedule` null: the rate stays. `skips`: steps
  // whose gradients are not finite.
  RunWatch(const ShardedModel* model, const Optimization* optimization,
           const LrSchedule* schedule, const proto::Config* config, bool skips);
  ~RunWatch();

  // A Backward that went well, of optimizer step `step`; the loss counts.
  // LOCAL.
  void AddLoss(const at::Tensor& loss, int64_t step);
  // Tells of the last loss of a device, if it has come; with `wait`, waits for
  // it. LOCAL.
  void TellLoss(bool wait);

  // Step was called, whatever came of it.
  void NoteStepCall() { step_called_ = true; }
  // The engine goes. LOCAL.
  void End();

  // The step after `steps_done` gets its rate. LOCAL.
  void AddRate(int64_t steps_done);

  // What of the next step is not finite is to be found, if it is skipped: an
  // error is to name it, or a warning, to which that costs nothing. The same on
  // all ranks. LOCAL.
  bool names_next() const;
  // What became of an optimizer step, `steps_done` so far, whose loss scale was
  // `scale` and is the scaler's now. OutOfRange where too many in a row were
  // skipped. The same on all ranks. LOCAL.
  absl::Status AddOutcome(const StepReport& report, int64_t steps_done,
                          double scale);
  // Another run goes on.
  void Restart() { skipped_in_a_row_ = 0; }

 private:
  struct Look;
  void TellNarrow(const at::Tensor& loss);
  void Tell(double loss, int64_t step);
  bool HasGradients() const;

  const ShardedModel& model_;
  const Optimization& optimization_;
  const LrSchedule* const schedule_;
  const proto::Config& config_;
  const bool skips_;
  std::unique_ptr<Look> look_;  // at a device's loss; null: there was none
  int64_t skipped_in_a_row_ = 0;
  bool backward_made_ = false, step_called_ = false;
  // What has been told.
  bool told_loss_ = false, told_narrow_ = false, told_skip_ = false,
       told_rate_ = false, told_end_ = false;
};

}  // namespace tessera
#endif  // ENGINE_TRAIN_RUN_WATCH_H_
