#include "engine/parts/learning_rate.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "engine/setup/initial_sync.h"
#include "optim/schedule/plateau.h"

namespace tessera {

AdamWOptions ScheduledOptions(const EngineParts& parts, int64_t steps_done) {
  AdamWOptions options = parts.optimizer->options();
  if (parts.lr_schedule == nullptr) return options;
  options.lr =
      parts.lr_schedule->Rate(steps_done, parts.optimizer->configured_rate());
  const auto betas = parts.lr_schedule->BetasAt(steps_done);
  if (betas.has_value()) {
    options.beta1 = betas->beta1;
    options.beta2 = betas->beta2.value_or(options.beta2);
  }
  return options;
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
  parts->optimizer->SetRate(rate);
  parts->program_rate = rate;
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
