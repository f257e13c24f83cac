#include "optim/custom/custom_optimizer.h"

#include <algorithm>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "optim/algorithms/coefficients.h"
#include "optim/kernels/element_step.h"

namespace tessera {
namespace {

absl::Status CheckState(const std::string& name) {
  const bool plain =
      !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
        return absl::ascii_isalnum(static_cast<uint8_t>(c)) || c == '_' ||
               c == '.';
      });
  if (plain && name != "value" && name != "ema") return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "state '", name,
      "': expected letters, digits, '_' and '.', and neither 'value' nor "
      "'ema', which are the engine's"));
}

absl::Status Check(const CustomOptimizer& optimizer) {
  if (optimizer.step == nullptr) {
    return absl::InvalidArgumentError("it has no function `step`");
  }
  if (optimizer.states.size() > kMaxCustomStates) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected at most ", kMaxCustomStates, " states, got ",
                     optimizer.states.size()));
  }
  std::set<std::string> seen;
  for (const std::string& state : optimizer.states) {
    TESSERA_RETURN_IF_ERROR(CheckState(state));
    if (seen.insert(state).second) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("there are two states '", state, "'"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckCustomOptimizer(const CustomOptimizer& optimizer) {
  if (optimizer.name.empty()) {
    return absl::InvalidArgumentError(
        "EngineOptions::optimizer: it has no name, by which checkpoints know "
        "it");
  }
  return Annotate(Check(optimizer), absl::StrCat("EngineOptions::optimizer '",
                                                 optimizer.name, "'"));
}

std::string DescribeCustom(const CustomOptimizer& optimizer) {
  return absl::StrCat(optimizer.name, "(", absl::StrJoin(optimizer.states, ","),
                      ")");
}

// Units in memory are stepped while others come from a disk, on another thread:
// a program is spared that.
absl::Status CallCustom(const CustomOptimizer& optimizer,
                        const CustomStep& step) {
  static absl::Mutex mutex(absl::kConstInit);
  absl::MutexLock lock(&mutex);
  const absl::Status called =
      CatchTorch("exception", [&] { return optimizer.step(step); });
  if (called.ok()) return called;
  return Annotate(called, absl::StrCat("optimizer '", optimizer.name,
                                       "', parameter '", step.parameter, "'"));
}

std::vector<std::string> StateNamesOf(const OptimizerOptions& options) {
  if (options.custom != nullptr) return options.custom->states;
  const StepStates states = StatesOf(FormulaOf(options));
  std::vector<std::string> names;
  for (int s = 0; s < states.count; ++s) names.push_back(states.states[s].name);
  return names;
}

std::string OptimizerNameOf(const OptimizerOptions& options) {
  return options.custom != nullptr ? DescribeCustom(*options.custom)
                                   : NameOf(FormulaOf(options));
}

}  // namespace tessera
