// WarmupFirst: a warm-up of some steps, and then another schedule from its
// beginning. `linear` is to the bit torch's
//   SequentialLR([LinearLR(start_factor, total_iters=n), X], milestones=[n]).
//
//   i < n    target * f(i / n)   f(0) = start_factor, f(1) = 1
//   i >= n   X at step i - n
//
//   f(x)     linear       a + (1 - a) * x
//            exponential  a^(1 - x)
//            cosine       a + (1 - a) * (1 - cos(pi x)) / 2     a: start_factor
//
// The target is the group's own rate, or the first one of a schedule that sets
// rates of its own (LrSchedule::WarmupTarget). It is not always X's first rate:
// LinearLR, say, begins with a part of the group's rate, as after torch's
// warm-up.
// Source: Goyal et al., "Accurate, large minibatch SGD", 2017.
#ifndef OPTIM_SCHEDULE_WARMUP_H_
#define OPTIM_SCHEDULE_WARMUP_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "optim/schedule/lr_schedule.h"
#include "optim/schedule/torch_schedules.h"

namespace tessera {

struct WarmupOptions {
  enum class Shape { kLinear, kExponential, kCosine };
  int64_t num_steps = 1;            // > 0
  double start_factor = 1.0 / 3.0;  // above 0, at most 1
  Shape shape = Shape::kLinear;
};

class WarmupFirst : public LrSchedule {
 public:
  WarmupFirst(const WarmupOptions& options, std::unique_ptr<LrSchedule> then);

  double Rate(int64_t steps_done, double base_lr) const override;
  // During the warm-up those of the other schedule's first step.
  std::optional<Betas> BetasAt(int64_t steps_done) const override;
  std::optional<int64_t> RisesAfter() const override;
  Plateau* plateau() override { return then_->plateau(); }

 private:
  double Factor(int64_t steps_done) const;

  WarmupOptions o_;
  LinearLr linear_;
  std::unique_ptr<LrSchedule> then_;
};

}  // namespace tessera
#endif  // OPTIM_SCHEDULE_WARMUP_H_
