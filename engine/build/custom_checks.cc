#include "engine/build/custom_checks.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "config/config.pb.h"

namespace tessera {
namespace {

constexpr char kCustom[] = "Custom";

// As they are where a configuration says nothing: what else is there was meant
// to do something.
bool SetsNothing(const proto::OptimizerParams& p) {
  const OptimizerOptions o;
  const bool betas =
      p.betas_size() == 0 ||
      (p.betas_size() == 2 && p.betas(0) == o.beta1 && p.betas(1) == o.beta2);
  return betas && p.eps() == o.eps && p.weight_decay() == o.weight_decay &&
         p.bias_correction() == o.bias_correction && p.amsgrad() == o.amsgrad &&
         p.momentum() == o.momentum && p.dampening() == o.dampening &&
         p.nesterov() == o.nesterov && p.alpha() == o.alpha &&
         p.centered() == o.centered && p.lr_decay() == o.lr_decay &&
         p.initial_accumulator_value() == o.initial_accumulator_value &&
         p.min_coeff() == o.min_coeff && p.max_coeff() == o.max_coeff &&
         p.maximize() == o.maximize;
}

absl::Status CheckRateAlone(const proto::Config& config,
                            const std::string& name) {
  if (config.scheduler().params().cycle_momentum()) {
    return absl::UnimplementedError(
        absl::StrCat("scheduler.params.cycle_momentum: the optimizer '", name,
                     "' has its momentum from elsewhere; set it to false"));
  }
  const proto::Optimizer& optimizer = config.optimizer();
  if (SetsNothing(optimizer.params()) && optimizer.no_decay() != "auto") {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "optimizer: of options the optimizer '", name,
      "' reads lr alone, so leave others of params, and no_decay, out: they "
      "are for who makes it to say"));
}

}  // namespace

absl::Status CheckCustom(const proto::Config& config,
                         const std::optional<CustomOptimizer>& optimizer) {
  const bool wanted = config.optimizer().type() == kCustom;
  if (wanted != optimizer.has_value()) {
    return absl::InvalidArgumentError(
        wanted ? "optimizer.type: Custom: expected a program's own, "
                 "EngineOptions::optimizer, which is not set"
               : "EngineOptions::optimizer: expected \"optimizer\": {\"type\": "
                 "\"Custom\"} in the configuration");
  }
  if (!optimizer.has_value()) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(CheckCustomOptimizer(*optimizer));
  return optimizer->reads_rate_alone ? CheckRateAlone(config, optimizer->name)
                                     : absl::OkStatus();
}

}  // namespace tessera
