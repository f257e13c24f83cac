// StepsInBackward: steps of units that are made, for good, while a backward
// goes on: as soon as a unit's gradient is reduced, which is dropped then
// (sharding.step_in_backward). So no more gradients exist than those of the
// units that are at work. Unlike early steps (optim/early_steps.h) they are not
// speculative: nothing of the step may depend on other gradients.
//
// From its step until ShardedOptimizer::Step publishes it a unit cannot be used
// (FlatParameter::Block).
//
// Sources: torch's optimizers that step in hooks after a gradient is
// accumulated; LOMO (arXiv 2306.09782).
//
// Threads: none of its own; the caller orders the calls.
#ifndef OPTIM_STEPS_IN_BACKWARD_H_
#define OPTIM_STEPS_IN_BACKWARD_H_

#include <cstddef>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/states/optimizer_states.h"
#include "optim/states/parameter_groups.h"
#include "optim/states/step_counts.h"
#include "optim/unit_step.h"
#include "sharding/gradient/gradients.h"

namespace tessera {

class StepsInBackward {
 public:
  using Flats = OptimizerStates::Flats;

  // All outlive this.
  StepsInBackward(Flats flats, const ParameterGroups* groups,
                  OptimizerStates* states, const StepCounts* counts)
      : flats_(std::move(flats)),
        groups_(*groups),
        states_(*states),
        counts_(*counts),
        units_(flats_.size()) {}

  // Begins a backward whose gradients are those of a step with these options,
  // by group, once they are divided by `divisor`; elements are clipped to
  // [-max_value, max_value] then, unless that is 0. LOCAL.
  void Begin(std::vector<OptimizerOptions> options, double divisor,
             double max_value);
  // Steps a unit with the sums that have come, and uses these up. Leaves it to
  // ShardedOptimizer::Step where that is not safe: this rank lacks a gradient
  // that is expected, so which parameters have one is not known yet, or
  // somebody holds the unit. After an error the unit was stepped in part if its
  // gradient is used up, else not at all. LOCAL; ASYNC on devices.
  absl::Status Step(size_t unit, FlatGradient* gradient);
  // Whether a unit was stepped since Begin; and whether its working shard was
  // written, too.
  bool stepped(size_t unit) const { return units_[unit].stepped; }
  bool working_written(size_t unit) const {
    return units_[unit].working_written;
  }
  // Ends the step.
  void End();

 private:
  struct Unit {
    bool stepped = false;
    bool working_written = false;
  };
  absl::Status StepUnit(size_t unit, FlatGradient* gradient);

  const Flats flats_;
  const ParameterGroups& groups_;
  OptimizerStates& states_;
  const StepCounts& counts_;
  std::vector<OptimizerOptions> options_;  // of the step, by group
  double divisor_ = 1;
  double max_value_ = 0;
  std::vector<Unit> units_;
  UnitStep::Counts tensors_;  // of numbers of steps, until End
};

}  // namespace tessera
#endif  // OPTIM_STEPS_IN_BACKWARD_H_
