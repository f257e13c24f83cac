#include <cmath>

#include "config/defaults.h"
#include "config/validate.h"

namespace tessera {

void ResolveLearningRateScaling(proto::Config* config, Faults* faults) {
  if (!config->has_learning_rate_scaling()) return;
  proto::LearningRateScaling& scaling =
      *config->mutable_learning_rate_scaling();
  if (scaling.has_base_batch_size() && !scaling.has_rule()) {
    faults->Add("learning_rate_scaling.rule",
                "missing: expected linear, sqrt or none");
  }
  FillDefaults(&scaling);
  double factor = 1;
  const bool sqrt = scaling.rule() == "sqrt";
  if (sqrt || scaling.rule() == "linear") {
    if (!scaling.has_base_batch_size()) {
      faults->Add("learning_rate_scaling.base_batch_size",
                  "missing: the rule '", scaling.rule(), "' needs it");
      return;
    }
    if (config->train_batch_size() < 1) return;  // a fault of its own
    factor = static_cast<double>(config->train_batch_size()) /
             static_cast<double>(scaling.base_batch_size());
    if (sqrt) factor = std::sqrt(factor);
  }
  if (scaling.has_factor() && scaling.factor() != factor) {
    faults->Add("learning_rate_scaling.factor", "expected ", factor,
                ", by rule, train_batch_size and base_batch_size, got ",
                scaling.factor(), "; leave it out");
  }
  scaling.set_factor(factor);
}

}  // namespace tessera
