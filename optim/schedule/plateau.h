// ReduceLROnPlateau of torch.optim.lr_scheduler (2.11): a rate that is reduced
// when a metric of the program (a validation loss) no longer improves.
//
//   Plateau      counts reports that are no better, and how often the rate has
//                been reduced: all that changes, for checkpoints
//   PlateauLr    a group's rate after so many reductions, of its own rate
//
// Every rank does the same, given the same metrics.
#ifndef OPTIM_SCHEDULE_PLATEAU_H_
#define OPTIM_SCHEDULE_PLATEAU_H_

#include <cstdint>

#include "optim/schedule/lr_schedule.h"

namespace tessera {

struct PlateauOptions {
  bool max = false;     // mode; else "min": less is better
  double factor = 0.1;  // of each reduction; 0 to 1
  int64_t patience = 10;
  double threshold = 1e-4;
  bool threshold_abs = false;  // threshold_mode; else "rel"
  int64_t cooldown = 0;
  double min_lr = 0;
  double eps = 1e-8;  // a reduction by no more than that is none
};

// The state of a Plateau.
struct PlateauState {
  double best = 0;
  int64_t bad_reports = 0;    // in a row, that were no better
  int64_t cooldown_left = 0;  // reports that do not count
  int64_t reductions = 0;     // so far
};

class Plateau {
 public:
  explicit Plateau(const PlateauOptions& options);

  // Reports a metric: torch's step(metric). A NaN is never better, as in torch.
  void Report(double metric);

  const PlateauState& state() const { return state_; }
  // REQUIRES: IsPossible(state).
  void Restore(const PlateauState& state) { state_ = state; }
  // Whether a Plateau could be in that state.
  static bool IsPossible(const PlateauState& state);

 private:
  bool IsBetter(double metric) const;

  PlateauOptions o_;
  PlateauState state_;
};

class PlateauLr : public LrSchedule {
 public:
  explicit PlateauLr(const PlateauOptions& options)
      : o_(options), plateau_(options) {}
  // Returns the rate after the reports so far, whatever `steps_done`.
  double Rate(int64_t steps_done, double base_lr) const override;
  // A warm-up rises to the rate as it has been reduced meanwhile.
  double WarmupTarget(double base_lr) const override {
    return Rate(0, base_lr);
  }
  Plateau* plateau() override { return &plateau_; }

 private:
  PlateauOptions o_;
  Plateau plateau_;
};

}  // namespace tessera
#endif  // OPTIM_SCHEDULE_PLATEAU_H_
