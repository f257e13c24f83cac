// StepCounts: counts the steps of each parameter of the model, and the weights
// of schedule-free averages that follow from them: identical on all ranks.
//
// Threads: none of its own; the caller orders the calls.
#ifndef OPTIM_STATES_STEP_COUNTS_H_
#define OPTIM_STATES_STEP_COUNTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "optim/algorithms/average_weights.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/states/parameter_groups.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

class StepCounts {
 public:
  StepCounts(size_t parameters, size_t groups)
      : steps_(parameters), weights_(groups), weights_before_(groups) {}

  // Steps done, by parameter of the model.
  std::vector<int64_t>& steps() { return steps_; }
  const std::vector<int64_t>& steps() const { return steps_; }
  // Weights by group, for groups that schedule-free AdamW steps.
  const std::vector<AverageWeights>& weights() const { return weights_; }
  void SetWeights(std::vector<AverageWeights> weights);

  // Begins counting what Uncount can take back.
  void Begin();
  // Counts a step of those parameters of `flat` that have a gradient.
  void Count(const FlatParameter& flat, const std::vector<bool>& has_gradient,
             const ParameterGroups& groups);
  // Takes back what was counted since Begin. Call it once.
  void Uncount();

  // Returns `options` with the weight that averages give to the next step. It
  // is set as if all groups were stepped: others do not read it.
  std::vector<OptimizerOptions> WithShares(
      std::vector<OptimizerOptions> options) const;

 private:
  std::vector<int64_t> steps_;
  std::vector<size_t> counted_;  // parameters, since Begin
  std::vector<AverageWeights> weights_, weights_before_;
};

}  // namespace tessera
#endif  // OPTIM_STATES_STEP_COUNTS_H_
