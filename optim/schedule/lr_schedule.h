// LrSchedule: the learning rate of each step, as a function of the optimizer
// steps done and the rate that a group of parameters is configured with. So
// there is nothing to save: an engine that resumes knows its steps. (What
// follows a metric of the program has a state, plateau.h.) Skipped steps
// (overflow) do not count.
//
//   deepspeed_schedules.h  WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle,
//                          LRRangeTest
//   torch_schedules.h      StepLR, MultiStepLR, ConstantLR, LinearLR,
//                          ExponentialLR, PolynomialLR, CosineAnnealingLR,
//                          CosineAnnealingWarmRestarts
//   torch_cycles.h         OneCycleLR, CyclicLR
//   plateau.h              ReduceLROnPlateau
//   warmup_stable_decay.h  WSD
//   warmup.h               a warm-up before any of them
//
// Each schedule computes, to the bit, what the library that it is named after
// computes, in double and with its operations in its order: a run that moves
// here continues with the same rates. So nothing in them is simplified, not
// even where exact arithmetic would allow it.
//
// Threads: outside order, const methods too (they keep what they have
// computed).
#ifndef OPTIM_SCHEDULE_LR_SCHEDULE_H_
#define OPTIM_SCHEDULE_LR_SCHEDULE_H_

#include <cstdint>
#include <optional>

namespace tessera {

class Plateau;  // optim/schedule/plateau.h

class LrSchedule {
 public:
  virtual ~LrSchedule() = default;

  // Returns the rate of the step after `steps_done` (at least 0), for a group
  // whose own rate is `base_lr`. LOCAL. O(1) if steps are asked for in
  // ascending order.
  virtual double Rate(int64_t steps_done, double base_lr) const = 0;

  struct Betas {
    double beta1;
    std::optional<double> beta2;  // unset: the optimizer's own stays
  };
  // Returns the betas of all groups, if the schedule sets them. LOCAL.
  virtual std::optional<Betas> BetasAt(int64_t /*steps_done*/) const {
    return std::nullopt;
  }

  // The rate that a warm-up before this schedule goes up to (warmup.h).
  virtual double WarmupTarget(double base_lr) const { return base_lr; }

  // The step after which the rate rises again, which surprises users who train
  // beyond it; unset: it does not, or rising is the schedule's purpose.
  virtual std::optional<int64_t> RisesAfter() const { return std::nullopt; }

  // The state of a schedule that follows a metric; null: it depends on the
  // steps only.
  virtual Plateau* plateau() { return nullptr; }
};

}  // namespace tessera
#endif  // OPTIM_SCHEDULE_LR_SCHEDULE_H_
