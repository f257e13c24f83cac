// Schedules of torch.optim.lr_scheduler (2.11) that move the rate in cycles and
// beta1 against it, as of an optimizer with betas; all groups have the same.
//
// Sources: Smith, "Cyclical learning rates for training neural networks", 2017;
// Smith & Topin, "Super-convergence", 2018.
#ifndef OPTIM_SCHEDULE_TORCH_CYCLES_H_
#define OPTIM_SCHEDULE_TORCH_CYCLES_H_

#include <array>
#include <cstdint>
#include <optional>

#include "optim/schedule/lr_schedule.h"

namespace tessera {

struct OneCycleLrOptions {
  double max_lr = 0;
  int64_t total_steps = 0;  // > 0
  double pct_start = 0.3;   // the part of total_steps that goes up
  bool linear = false;      // anneal_strategy; else "cos"
  bool cycle_momentum = true;
  double base_momentum = 0.85, max_momentum = 0.95;
  double div_factor = 25;         // the first rate is max_lr / this
  double final_div_factor = 1e4;  // the last rate is the first / this
  bool three_phase = false;  // up, down to the first rate, down to the last
};

// Up from max_lr / div_factor to max_lr, and down. After total_steps the last
// rate stays (torch raises an error).
class OneCycleLr : public LrSchedule {
 public:
  explicit OneCycleLr(const OneCycleLrOptions& options);
  double Rate(int64_t steps_done, double base_lr) const override;
  std::optional<Betas> BetasAt(int64_t steps_done) const override;
  double WarmupTarget(double /*base_lr*/) const override {
    return o_.max_lr / o_.div_factor;
  }

 private:
  struct Phase {
    double end_step;
    double start_lr, end_lr;
    double start_momentum, end_momentum;
  };
  // The phase of a step, and which part of it has passed.
  struct Place {
    Phase phase;
    double pct;
  };
  Place PlaceOf(int64_t steps_done) const;
  double Anneal(double start, double end, double pct) const;

  OneCycleLrOptions o_;
  std::array<Phase, 3> phases_;
  size_t num_phases_;
};

struct CyclicLrOptions {
  enum class Mode { kTriangular, kTriangular2, kExpRange };
  double base_lr = 0, max_lr = 0;
  int64_t step_size_up = 2000, step_size_down = 2000;  // > 0
  Mode mode = Mode::kTriangular;
  double gamma = 1;  // of kExpRange
  bool cycle_momentum = true;
  double base_momentum = 0.8, max_momentum = 0.9;
};

// Between base_lr and max_lr in straight lines, again and again.
class CyclicLr : public LrSchedule {
 public:
  explicit CyclicLr(const CyclicLrOptions& options) : o_(options) {}
  double Rate(int64_t steps_done, double base_lr) const override;
  std::optional<Betas> BetasAt(int64_t steps_done) const override;

 private:
  // How far up it is, 0 to 1, and what its height is multiplied with.
  struct Place {
    double height, factor;
  };
  Place PlaceOf(int64_t steps_done) const;

  CyclicLrOptions o_;
};

}  // namespace tessera
#endif  // OPTIM_SCHEDULE_TORCH_CYCLES_H_
