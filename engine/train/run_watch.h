// RunWatch: warns, once for each kind, of what goes wrong in a run without an
// error of any call: a loss that is not finite, a loss of 16 bits, a backward
// whose bits are others in each run, a skipped step, a learning rate that rises
// again, an engine that never steps, saves that nobody makes. It returns an
// error where too many steps in a row are skipped.
//
// It never waits for a device. A loss there is copied to the host
// asynchronously and looked at once it has arrived. Only one copy is under way
// at a time, so some losses are not looked at, but the last one is: after a
// loss that is not finite the later ones are not finite either, or its step is
// skipped.
//
// Threads: outside order.
#ifndef ENGINE_TRAIN_RUN_WATCH_H_
#define ENGINE_TRAIN_RUN_WATCH_H_

#include <cstdint>
#include <memory>
#include <utility>

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
  // All arguments outlive it. `schedule` null: the rate is constant. `skips`:
  // steps whose gradients are not finite are skipped.
  RunWatch(const ShardedModel* model, const Optimization* optimization,
           const LrSchedule* schedule, const proto::Config* config, bool skips);
  ~RunWatch();

  // Adds the loss of a successful Backward of optimizer step `step`. LOCAL.
  void AddLoss(const at::Tensor& loss, int64_t step);
  // Looks at the last loss of a device if it has arrived; with `wait`, waits
  // for it. LOCAL.
  void TellLoss(bool wait);

  // Notes that the engine has a CheckpointManager.
  void NoteManaged() { managed_ = true; }
  // Notes that Step was called, whatever its result. Warns at the first one if
  // the configuration says when to save, and there is no manager. LOCAL.
  void NoteStepCall() {
    if (!std::exchange(step_called_, true) && !managed_) TellUnmanaged();
  }
  bool step_called() const { return step_called_; }
  // Warns, when the engine ends, if it never made a step. LOCAL.
  void End();

  // Looks at the rate of the step after `steps_done`. LOCAL.
  void AddRate(int64_t steps_done);

  // Whether the next step, if it is skipped, must find which gradients are not
  // finite: for an error that names them, or for a warning where finding them
  // costs nothing. Identical on all ranks. LOCAL.
  bool names_next() const;
  // Adds the outcome of an optimizer step, after which `steps_done` are done;
  // its loss scale was `scale`, and is now the scaler's. OutOfRange where too
  // many steps in a row were skipped. Identical on all ranks. LOCAL.
  absl::Status AddOutcome(const StepReport& report, int64_t steps_done,
                          double scale);
  // Resets the count of skipped steps: another run is resumed.
  void Restart() { skipped_in_a_row_ = 0; }

 private:
  struct Look;
  void TellNarrow(const at::Tensor& loss);
  void TellUnordered(const at::Tensor& loss);
  void TellUnmanaged() const;
  void Tell(double loss, int64_t step);
  bool HasGradients() const;

  const ShardedModel& model_;
  const Optimization& optimization_;
  const LrSchedule* const schedule_;
  const proto::Config& config_;
  const bool skips_;
  std::unique_ptr<Look>
      look_;  // the copy of a device's loss; null: there was none
  int64_t skipped_in_a_row_ = 0;
  bool backward_made_ = false, step_called_ = false, managed_ = false;
  // Warnings that have been given.
  bool told_loss_ = false, told_narrow_ = false, told_skip_ = false,
       told_rate_ = false, told_end_ = false;
};

}  // namespace tessera
#endif  // ENGINE_TRAIN_RUN_WATCH_H_
