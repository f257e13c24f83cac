#include "optim/schedule/deepspeed_schedules.h"

#include <algorithm>
#include <cmath>

#include "optim/schedule/pi.h"

namespace tessera {
namespace {

constexpr double kCycleBeta2 = 0.99;

double Steps(int64_t warmup_num_steps) {
  return static_cast<double>(std::max<int64_t>(2, warmup_num_steps));
}

}  // namespace

// Each operation below is DeepSpeed's, with its quirks (a first rate that is
// not f(0), warm-ups of less than 2 steps that count as 2).
double DeepSpeedSchedule::Rate(int64_t steps_done, double base_lr) const {
  const double iteration =
      static_cast<double>(o_.last_batch_iteration + steps_done);
  if (steps_done > 0) return RateAt(iteration, base_lr);
  // DeepSpeed leaves the rate alone where a schedule begins in its middle.
  if (o_.last_batch_iteration != -1) return base_lr;
  switch (o_.type) {
    case DeepSpeedScheduleOptions::Type::kWarmup:
    case DeepSpeedScheduleOptions::Type::kWarmupDecay:
      return o_.warmup_min_lr;
    case DeepSpeedScheduleOptions::Type::kWarmupCosine:
      return 0;
    case DeepSpeedScheduleOptions::Type::kOneCycle:
      return o_.cycle_min_lr;
    case DeepSpeedScheduleOptions::Type::kRangeTest:
      return o_.range_min_lr;
  }
  return base_lr;
}

double DeepSpeedSchedule::RateAt(double iteration, double base_lr) const {
  const bool warms_up = iteration < Steps(o_.warmup_num_steps);
  const double rise = o_.warmup_max_lr - o_.warmup_min_lr;
  switch (o_.type) {
    case DeepSpeedScheduleOptions::Type::kWarmup:
      return o_.warmup_min_lr +
             rise * (warms_up ? WarmupFraction(iteration) : 1.0);
    case DeepSpeedScheduleOptions::Type::kWarmupDecay:
      return o_.warmup_min_lr + rise * (warms_up ? WarmupFraction(iteration)
                                                 : DecayFraction(iteration));
    case DeepSpeedScheduleOptions::Type::kWarmupCosine:
      return base_lr * CosineRatio(iteration);
    case DeepSpeedScheduleOptions::Type::kOneCycle:
      return CycleRate(iteration);
    case DeepSpeedScheduleOptions::Type::kRangeTest: {
      double interval =
          (iteration + 1) / static_cast<double>(o_.range_step_size);
      if (o_.range_staircase) interval = std::floor(interval);
      return o_.range_min_lr * (1 + o_.range_step_rate * interval);
    }
  }
  return base_lr;
}

double DeepSpeedSchedule::WarmupFraction(double iteration) const {
  const double steps = Steps(o_.warmup_num_steps);
  return o_.warmup_linear ? iteration / steps
                          : 1.0 / std::log(steps) * std::log(iteration + 1);
}

double DeepSpeedSchedule::DecayFraction(double iteration) const {
  const auto total = static_cast<double>(o_.total_num_steps);
  return std::max(0.0, (total - iteration) /
                           std::max(1.0, total - Steps(o_.warmup_num_steps)));
}

double DeepSpeedSchedule::CosineRatio(double iteration) const {
  const double steps = Steps(o_.warmup_num_steps);
  if (iteration < steps) {
    return o_.warmup_min_ratio +
           WarmupFraction(iteration) * (1.0 - o_.warmup_min_ratio);
  }
  const double left =
      std::max(1.0, static_cast<double>(o_.total_num_steps) - steps);
  const double progress = std::min(1.0, (iteration - steps + 1) / left);
  const double ratio = (1 + std::cos(kPi * progress)) / 2;
  return std::max(0.0, o_.cos_min_ratio + (1.0 - o_.cos_min_ratio) * ratio);
}

double DeepSpeedSchedule::CycleSize() const {
  return static_cast<double>(o_.cycle_first_step_size) +
         static_cast<double>(o_.cycle_second_step_size);
}

// 0 at the ends of a cycle, 1 at its peak.
double DeepSpeedSchedule::CycleScale(double iteration) const {
  const auto first = static_cast<double>(o_.cycle_first_step_size);
  const auto second = static_cast<double>(o_.cycle_second_step_size);
  const double size = CycleSize(), at = iteration + 1;
  const double peak = first / size;
  const double x = 1.0 + at / size - std::floor(1 + at / size);
  const bool rises = x <= peak;
  const int64_t stairs =
      rises ? o_.cycle_first_stair_count : o_.cycle_second_stair_count;
  if (stairs <= 0) return rises ? x / peak : (x - 1) / (peak - 1);
  const auto count = static_cast<double>(stairs);
  const double within = std::fmod(at, size);
  const double position = within <= first ? within * count / first
                                          : (size - within) * count / second;
  return std::floor(position) / count;
}

double DeepSpeedSchedule::CycleRate(double iteration) const {
  if (iteration < CycleSize()) {
    return o_.cycle_min_lr +
           (o_.cycle_max_lr - o_.cycle_min_lr) * CycleScale(iteration);
  }
  if (o_.decay_step_size == 0 || o_.decay_lr_rate == 0) return o_.cycle_min_lr;
  const double interval =
      (iteration - CycleSize() + 1) / static_cast<double>(o_.decay_step_size);
  return o_.cycle_min_lr / (1 + o_.decay_lr_rate * interval);
}

std::optional<LrSchedule::Betas> DeepSpeedSchedule::BetasAt(
    int64_t steps_done) const {
  if (o_.type != DeepSpeedScheduleOptions::Type::kOneCycle ||
      !o_.cycle_momentum) {
    return std::nullopt;
  }
  if (steps_done == 0) {
    if (o_.last_batch_iteration != -1) return std::nullopt;
    return Betas{o_.cycle_min_mom, kCycleBeta2};
  }
  const double iteration =
      static_cast<double>(o_.last_batch_iteration + steps_done);
  if (iteration < CycleSize()) {
    return Betas{o_.cycle_max_mom - (o_.cycle_max_mom - o_.cycle_min_mom) *
                                        CycleScale(iteration),
                 kCycleBeta2};
  }
  if (o_.decay_step_size == 0 || o_.decay_mom_rate == 0) {
    return Betas{o_.cycle_max_mom, kCycleBeta2};
  }
  const double interval =
      (iteration - CycleSize() + 1) / static_cast<double>(o_.decay_step_size);
  return Betas{o_.cycle_max_mom * (1 + o_.decay_mom_rate * interval),
               kCycleBeta2};
}

}  // namespace tessera
