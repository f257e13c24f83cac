// WSD, warmup-stable-decay: up in a straight line, constant, and down over the
// last steps, so that how long a run is to be need not be known before the
// decay. Each group's own rate times
//
//   i < W       a + (1 - a) * i / W                     a: warmup_min_ratio
//   i < T - D   1
//   i < T       m + (1 - m) * shape((i - (T - D)) / D)  m: decay_min_ratio
//   after       m
//
//   shape(x)    linear 1 - x, cosine (1 + cos(pi x)) / 2, one_minus_sqrt
//               1 - sqrt(x)
//
// with i steps done, W, D and T steps of warm-up, decay and in all.
// Sources: Hu et al., "MiniCPM", 2024; Haegele et al., "Scaling laws and
// compute-optimal training beyond fixed training durations", 2024 (1 - sqrt).
#ifndef OPTIM_SCHEDULE_WARMUP_STABLE_DECAY_H_
#define OPTIM_SCHEDULE_WARMUP_STABLE_DECAY_H_

#include <cstdint>

#include "optim/schedule/lr_schedule.h"

namespace tessera {

struct WarmupStableDecayOptions {
  enum class Shape { kLinear, kCosine, kOneMinusSqrt };
  int64_t warmup_num_steps = 0, decay_num_steps = 0;
  int64_t total_num_steps = 0;  // at least the sum of the two
  double warmup_min_ratio = 0, decay_min_ratio = 0;
  Shape shape = Shape::kLinear;
};

class WarmupStableDecay : public LrSchedule {
 public:
  explicit WarmupStableDecay(const WarmupStableDecayOptions& options)
      : o_(options) {}
  double Rate(int64_t steps_done, double base_lr) const override;

 private:
  double Factor(int64_t steps_done) const;

  WarmupStableDecayOptions o_;
};

}  // namespace tessera
#endif  // OPTIM_SCHEDULE_WARMUP_STABLE_DECAY_H_
