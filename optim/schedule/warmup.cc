#include "optim/schedule/warmup.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "optim/schedule/pi.h"

namespace tessera {

WarmupFirst::WarmupFirst(const WarmupOptions& options,
                         std::unique_ptr<LrSchedule> then)
    : o_(options),
      linear_(o_.start_factor, 1.0, o_.num_steps),
      then_(std::move(then)) {}

// Not of the linear shape, whose roundings are torch's.
double WarmupFirst::Factor(int64_t steps_done) const {
  const double x =
      static_cast<double>(steps_done) / static_cast<double>(o_.num_steps);
  if (o_.shape == WarmupOptions::Shape::kExponential) {
    return std::pow(o_.start_factor, 1 - x);
  }
  return o_.start_factor + (1 - o_.start_factor) * (1 - std::cos(kPi * x)) / 2;
}

double WarmupFirst::Rate(int64_t steps_done, double base_lr) const {
  if (steps_done >= o_.num_steps) {
    return then_->Rate(steps_done - o_.num_steps, base_lr);
  }
  const double target = then_->WarmupTarget(base_lr);
  return o_.shape == WarmupOptions::Shape::kLinear
             ? linear_.Rate(steps_done, target)
             : target * Factor(steps_done);
}

std::optional<int64_t> WarmupFirst::RisesAfter() const {
  const std::optional<int64_t> after = then_->RisesAfter();
  if (!after.has_value()) return std::nullopt;
  int64_t both = 0;
  if (__builtin_add_overflow(*after, o_.num_steps, &both)) return std::nullopt;
  return both;
}

std::optional<LrSchedule::Betas> WarmupFirst::BetasAt(
    int64_t steps_done) const {
  return then_->BetasAt(std::max<int64_t>(0, steps_done - o_.num_steps));
}

}  // namespace tessera
