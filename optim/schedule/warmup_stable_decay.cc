#include "optim/schedule/warmup_stable_decay.h"

#include <cmath>

#include "optim/schedule/pi.h"

namespace tessera {
namespace {

double Shaped(WarmupStableDecayOptions::Shape shape, double x) {
  switch (shape) {
    case WarmupStableDecayOptions::Shape::kLinear:
      return 1 - x;
    case WarmupStableDecayOptions::Shape::kCosine:
      return (1 + std::cos(kPi * x)) / 2;
    case WarmupStableDecayOptions::Shape::kOneMinusSqrt:
      return 1 - std::sqrt(x);
  }
  return 1;
}

}  // namespace

double WarmupStableDecay::Factor(int64_t steps_done) const {
  const auto done = static_cast<double>(steps_done);
  if (steps_done < o_.warmup_num_steps) {
    const double a = o_.warmup_min_ratio;
    return a + (1 - a) * (done / static_cast<double>(o_.warmup_num_steps));
  }
  const int64_t decay_begin = o_.total_num_steps - o_.decay_num_steps;
  if (steps_done < decay_begin) return 1;
  const double m = o_.decay_min_ratio;
  if (steps_done >= o_.total_num_steps) return m;
  return m + (1 - m) * Shaped(o_.shape,
                              static_cast<double>(steps_done - decay_begin) /
                                  static_cast<double>(o_.decay_num_steps));
}

double WarmupStableDecay::Rate(int64_t steps_done, double base_lr) const {
  return base_lr * Factor(steps_done);
}

}  // namespace tessera
