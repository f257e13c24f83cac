#include "optim/states/step_counts.h"

#include <utility>

namespace tessera {

void StepCounts::SetWeights(std::vector<AverageWeights> weights) {
  weights_before_ = weights_ = std::move(weights);
}

void StepCounts::Begin() {
  counted_.clear();
  weights_before_ = weights_;
}

void StepCounts::Count(const FlatParameter& flat,
                       const std::vector<bool>& has_gradient,
                       const ParameterGroups& groups) {
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    if (!has_gradient[i]) continue;
    const auto index = static_cast<size_t>(flat.parameters()[i].index);
    counted_.push_back(index);
    ++steps_[index];
    const auto group = static_cast<size_t>(groups.of[index]);
    const OptimizerOptions& options = groups.options[group];
    if (options.algorithm == Algorithm::kScheduleFree &&
        weights_[group] == weights_before_[group]) {
      weights_[group] = weights_[group].After(options);
    }
  }
}

void StepCounts::Uncount() {
  for (const size_t i : counted_) --steps_[i];
  counted_.clear();
  weights_ = weights_before_;
}

std::vector<OptimizerOptions> StepCounts::WithShares(
    std::vector<OptimizerOptions> options) const {
  for (size_t g = 0; g < options.size(); ++g) {
    if (options[g].algorithm != Algorithm::kScheduleFree) continue;
    options[g].average_share = weights_[g].ShareOf(options[g]);
  }
  return options;
}

}  // namespace tessera
