#include "engine/parts/learning_rate.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "engine/setup/initial_sync.h"
#include "optim/algorithms/option_names.h"
#include "optim/schedule/plateau.h"

namespace tessera {

namespace {

// torch's cycles move the momentum of an optimizer that has no betas; of a
// program's own, which may read either, both.
void SetMomentum(const LrSchedule::Betas& betas, OptimizerOptions* options) {
  if (OptionOf("beta1", *options).ok()) {
    options->beta1 = betas.beta1;
    options->beta2 = betas.beta2.value_or(options->beta2);
    if (options->custom == nullptr) return;
  }
  if (!betas.beta2.has_value() && options->momentum > 0) {
    options->momentum = betas.beta1;
  }
}

}  // namespace

std::vector<OptimizerOptions> ScheduledOptions(const EngineParts& parts,
                                               int64_t steps_done) {
  std::vector<OptimizerOptions> groups = parts.groups.options;
  if (parts.lr_schedule == nullptr) return groups;
  for (OptimizerOptions& options : groups) {
    options.lr = parts.lr_schedule->Rate(steps_done, options.lr);
    const auto betas = parts.lr_schedule->BetasAt(steps_done);
    if (betas.has_value()) SetMomentum(*betas, &options);
  }
  return groups;
}

bool SetsMomentum(const EngineParts& parts, int64_t steps_done,
                  absl::string_view option) {
  if (parts.lr_schedule == nullptr) return false;
  const auto betas = parts.lr_schedule->BetasAt(steps_done);
  if (!betas.has_value()) return false;
  return option == "beta1" ||
         option == (betas->beta2.has_value() ? "beta2" : "momentum");
}

absl::Status SetLearningRate(EngineParts* parts, double rate) {
  TESSERA_RETURN_IF_ERROR(parts->CheckOpen());
  absl::Status mine;
  if (parts->optimizer == nullptr || parts->lr_schedule != nullptr) {
    mine = absl::FailedPreconditionError(
        absl::StrCat("the configuration has ",
                     parts->optimizer == nullptr
                         ? "no optimizer"
                         : "a scheduler, which sets the rate itself"));
  } else if (!std::isfinite(rate) || rate < 0) {
    mine = absl::InvalidArgumentError(
        absl::StrCat("expected a finite number of at least 0, got ", rate));
  }
  TESSERA_RETURN_IF_ERROR(parts->comm->AgreeOk(mine, "SetLearningRate"));
  TESSERA_RETURN_IF_ERROR(CheckSame(absl::StrFormat("%.17g", rate),
                                    "rate of SetLearningRate",
                                    parts->comm.get()));
  for (OptimizerOptions& group : parts->groups.options) group.lr = rate;
  return absl::OkStatus();
}

absl::Status ReportMetric(EngineParts* parts, double metric) {
  TESSERA_RETURN_IF_ERROR(parts->CheckOpen());
  Plateau* const plateau =
      parts->lr_schedule == nullptr ? nullptr : parts->lr_schedule->plateau();
  absl::Status mine;
  if (plateau == nullptr) {
    mine = absl::FailedPreconditionError(
        "the configuration has no scheduler that follows a metric "
        "(ReduceLROnPlateau)");
  }
  TESSERA_RETURN_IF_ERROR(parts->comm->AgreeOk(mine, "ReportMetric"));
  // NaNs of any sign are the same.
  const std::string text =
      std::isnan(metric) ? "nan" : absl::StrFormat("%.17g", metric);
  TESSERA_RETURN_IF_ERROR(
      CheckSame(text, "metric of ReportMetric", parts->comm.get()));
  plateau->Report(metric);
  return absl::OkStatus();
}

}  // namespace tessera
