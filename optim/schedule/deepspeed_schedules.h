// DeepSpeed's schedules (0.19.8). WarmupLR, WarmupDecayLR, OneCycle and
// LRRangeTest set rates of their own for all groups, WarmupCosineLR multiplies
// each group's.
//
//   steps done     0        1        2 ...
//   rate      the first   f(0)     f(1)     f(i): after "batch iteration" i
//
// Sources: Goyal et al., 2017 (warmup); Smith, "A disciplined approach to
// neural network hyper-parameters", 2018 (OneCycle, LRRangeTest).
#ifndef OPTIM_SCHEDULE_DEEPSPEED_SCHEDULES_H_
#define OPTIM_SCHEDULE_DEEPSPEED_SCHEDULES_H_

#include <cstdint>
#include <optional>

#include "optim/schedule/lr_schedule.h"

namespace tessera {

struct DeepSpeedScheduleOptions {
  enum class Type {
    kWarmup,
    kWarmupDecay,
    kWarmupCosine,
    kOneCycle,
    kRangeTest
  };
  Type type = Type::kWarmup;
  int64_t last_batch_iteration = -1;

  // Warmups. Steps; below 2 they count as 2.
  double warmup_min_lr = 0, warmup_max_lr = 1e-3;
  int64_t warmup_num_steps = 1000;
  bool warmup_linear = false;  // else logarithmic
  int64_t total_num_steps = 0;
  double warmup_min_ratio = 0, cos_min_ratio = 1e-4;

  double cycle_min_lr = 0, cycle_max_lr = 0, decay_lr_rate = 0;
  int64_t cycle_first_step_size = 2000, cycle_second_step_size = 2000;
  int64_t cycle_first_stair_count = 0, cycle_second_stair_count = 0;
  int64_t decay_step_size = 0;
  bool cycle_momentum = true;
  double cycle_min_mom = 0.8, cycle_max_mom = 0.9, decay_mom_rate = 0;

  double range_min_lr = 1e-3, range_step_rate = 1;
  int64_t range_step_size = 2000;
  bool range_staircase = false;
};

class DeepSpeedSchedule : public LrSchedule {
 public:
  explicit DeepSpeedSchedule(const DeepSpeedScheduleOptions& options)
      : o_(options) {}

  double Rate(int64_t steps_done, double base_lr) const override;
  std::optional<Betas> BetasAt(int64_t steps_done) const override;
  // The schedule's own first rate, which need not be near that of the group.
  double WarmupTarget(double base_lr) const override {
    return Rate(0, base_lr);
  }

 private:
  double WarmupFraction(double iteration) const;
  double RateAt(double iteration, double base_lr) const;
  double DecayFraction(double iteration) const;
  double CosineRatio(double iteration) const;
  double CycleScale(double iteration) const;
  double CycleSize() const;
  double CycleRate(double iteration) const;

  DeepSpeedScheduleOptions o_;
};

}  // namespace tessera
#endif  // OPTIM_SCHEDULE_DEEPSPEED_SCHEDULES_H_
