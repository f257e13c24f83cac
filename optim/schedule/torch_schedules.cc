#include "optim/schedule/torch_schedules.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "optim/schedule/pi.h"

namespace tessera {
namespace {

double D(int64_t steps) { return static_cast<double>(steps); }

}  // namespace

double MultiStepLr::Next(int64_t step, double last, double /*base_lr*/) const {
  const auto [begin, end] =
      std::equal_range(milestones_.begin(), milestones_.end(), step);
  return begin == end ? last : last * std::pow(gamma_, D(end - begin));
}

double LinearLr::Next(int64_t step, double last, double /*base_lr*/) const {
  const double rise = end_factor_ - start_factor_;
  return last *
         (1.0 + rise / (D(total_iters_) * start_factor_ + D(step - 1) * rise));
}

double PolynomialLr::Next(int64_t step, double last, double /*base_lr*/) const {
  return last * std::pow((1.0 - D(step) / D(total_iters_)) /
                             (1.0 - D(step - 1) / D(total_iters_)),
                         power_);
}

double CosineAnnealingLr::First(double base_lr) const {
  return after_warmup_
             ? eta_min_ + (base_lr - eta_min_) * (1 + std::cos(0.0)) / 2
             : base_lr;
}

double CosineAnnealingLr::Next(int64_t step, double last,
                               double base_lr) const {
  // From the lowest point, which no factor leads away from.
  if ((step - 1 - t_max_) % (2 * t_max_) == 0) {
    return last + (base_lr - eta_min_) * (1 - std::cos(kPi / D(t_max_))) / 2;
  }
  return (1 + std::cos(kPi * D(step) / D(t_max_))) /
             (1 + std::cos(kPi * D(step - 1) / D(t_max_))) * (last - eta_min_) +
         eta_min_;
}

double CosineAnnealingWarmRestarts::Rate(int64_t steps_done,
                                         double base_lr) const {
  int64_t within = steps_done, length = t_0_;
  if (t_mult_ == 1) within %= length;
  while (within >= length) {
    within -= length;
    if (__builtin_mul_overflow(length, t_mult_, &length)) {
      length = std::numeric_limits<int64_t>::max();
    }
  }
  return eta_min_ +
         (base_lr - eta_min_) * (1 + std::cos(kPi * D(within) / D(length))) / 2;
}

}  // namespace tessera
