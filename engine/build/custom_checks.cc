#include "engine/build/custom_checks.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "config/config.pb.h"
#include "config/options/option_values.h"
#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

constexpr char kCustom[] = "Custom";

// As they are where a configuration says nothing: what else is there was meant
// to do something.
bool SetsNothing(const proto::OptimizerParams& params) {
  const AlgorithmRow& row = RowOf(Algorithm::kCustom);
  for (const auto& [name, value] : OptionValuesOf(params)) {
    const Option* const option = row.Find(name);
    if (option == nullptr || name == "lr" || name == "ema_decay") continue;
    if (value != option->value) return false;
  }
  return true;
}

absl::Status CheckRateAlone(const proto::Config& config,
                            const std::string& name) {
  if (config.scheduler().params().cycle_momentum()) {
    return absl::UnimplementedError(
        absl::StrCat("scheduler.params.cycle_momentum: the optimizer '", name,
                     "' does not take its momentum from the configuration; set "
                     "it to false"));
  }
  const proto::Optimizer& optimizer = config.optimizer();
  if (SetsNothing(optimizer.params()) && optimizer.no_decay() != "auto") {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "optimizer: the optimizer '", name,
      "' reads only lr from the configuration; leave out the other params and "
      "no_decay, and set them in the factory"));
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
