// RecursiveSchedule: a schedule whose rate is computed from the rate before, as
// torch.optim.lr_scheduler computes several of them. The recursion is replayed,
// since its roundings add up: a closed form is near these rates, not equal.
//
// It is still a function of the step. What has been computed is kept: the last
// rate, and one of every kMarkSteps, so that a step before the last one asked
// for costs kMarkSteps operations at most.
#ifndef OPTIM_SCHEDULE_RECURSIVE_SCHEDULE_H_
#define OPTIM_SCHEDULE_RECURSIVE_SCHEDULE_H_

#include <cstdint>
#include <vector>

#include "optim/schedule/lr_schedule.h"

namespace tessera {

class RecursiveSchedule : public LrSchedule {
 public:
  // The first time, or after a step much further on, O(steps_done).
  double Rate(int64_t steps_done, double base_lr) const final;

 private:
  static constexpr int64_t kMarkSteps = 4096;

  // Returns the rate of step 0.
  virtual double First(double base_lr) const = 0;
  // Returns the rate of `step` (at least 1), from the one before, `last`.
  virtual double Next(int64_t step, double last, double base_lr) const = 0;
  // Returns the step from which on the rate is constant.
  virtual int64_t LastChange() const { return INT64_MAX; }

  // The rates for one base rate.
  struct Track {
    double base_lr;
    int64_t step;
    double rate;                // of step
    std::vector<double> marks;  // of 0, kMarkSteps, 2 * kMarkSteps, ... <= step
  };
  Track* TrackOf(double base_lr) const;

  mutable std::vector<Track> tracks_;  // as many as base rates are asked for
};

}  // namespace tessera
#endif  // OPTIM_SCHEDULE_RECURSIVE_SCHEDULE_H_
