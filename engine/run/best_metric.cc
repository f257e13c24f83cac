#include "engine/run/best_metric.h"

#include <cmath>
#include <map>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace tessera {

bool BestMetric::Report(double metric, int64_t step) {
  const double gain =
      options_.larger_is_better ? metric - value_ : value_ - metric;
  const bool better = any() ? gain > options_.min_delta : !std::isnan(metric);
  if (!better) {
    ++not_better_;
    return false;
  }
  value_ = metric;
  step_ = step;
  not_better_ = 0;
  return true;
}

std::string BestMetric::State() const {
  if (!any() && not_better_ == 0) return "";
  return absl::StrFormat("best=%a step=%d not_better=%d", value_, step_,
                         not_better_);
}

absl::Status BestMetric::Load(absl::string_view state) {
  double value = 0;
  int64_t step = -1, not_better = 0;
  if (!state.empty()) {
    std::map<std::string, std::string> parts;
    for (const absl::string_view word : absl::StrSplit(state, ' ')) {
      parts.insert(absl::StrSplit(word, absl::MaxSplits('=', 1)));
    }
    if (parts.size() != 3 || !absl::SimpleAtod(parts["best"], &value) ||
        !absl::SimpleAtoi(parts["step"], &step) ||
        !absl::SimpleAtoi(parts["not_better"], &not_better) || step < -1 ||
        not_better < 0 || std::isnan(value)) {
      return absl::DataLossError(
          absl::StrCat("expected the best metric of a run, got '", state, "'"));
    }
  }
  value_ = value;
  step_ = step;
  not_better_ = not_better;
  return absl::OkStatus();
}

}  // namespace tessera
