#include "optim/algorithms/option_names.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/edit_distance.h"
#include "optim/algorithms/algorithm.h"
#include "optim/algorithms/coefficients.h"

namespace tessera {
namespace {

absl::StatusOr<const Option*> Find(absl::string_view name,
                                   Algorithm algorithm) {
  if (const Option* const option = RowOf(algorithm).Find(name)) return option;
  const std::vector<std::string> known = OptionNames(algorithm);
  const std::string nearest = NearestName(name, known);
  return absl::InvalidArgumentError(absl::StrCat(
      "option '", name, "': ", NameOf(algorithm), " has no such; it has ",
      absl::StrJoin(known, ", "),
      nearest.empty() ? "" : absl::StrCat("; did you mean '", nearest, "'?")));
}

absl::Status CheckRange(const Option& option, double value) {
  const bool good =
      std::isfinite(value) && value < option.below &&
      (option.above ? value > option.least : value >= option.least);
  if (good) return absl::OkStatus();
  std::string range = "a finite number";
  if (std::isfinite(option.least)) {
    absl::StrAppend(&range, option.above ? " above " : " of at least ",
                    option.least);
  }
  if (std::isfinite(option.below)) {
    absl::StrAppend(&range, " and below ", option.below);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "option '", option.name, "': expected ", range, ", got ", value));
}

absl::Status Assign(absl::string_view name, double value,
                    OptimizerOptions* options) {
  const absl::StatusOr<const Option*> found = Find(name, options->algorithm);
  if (!found.ok()) return found.status();
  const Option& option = **found;
  if (option.number != nullptr) {
    const absl::Status in_range = CheckRange(option, value);
    if (!in_range.ok()) return in_range;
  } else if (value != 0 && value != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("option '", name, "': expected 0 or 1, got ", value));
  }
  option.Set(value, options);
  return absl::OkStatus();
}

}  // namespace

std::vector<std::string> OptionNames(Algorithm algorithm) {
  std::vector<std::string> names;
  for (const Option& option : RowOf(algorithm).options) {
    names.push_back(option.name);
  }
  return names;
}

absl::Status SetOptions(const OptionValues& values, OptimizerOptions* options) {
  OptimizerOptions changed = *options;
  for (const auto& [name, value] : values) {
    const absl::Status set = Assign(name, value, &changed);
    if (!set.ok()) return set;
    if (FormulaOf(changed) != FormulaOf(*options) ||
        (changed.ema_decay == 0) != (options->ema_decay == 0)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "option '", name, "': with ", value, " ", NameOf(options->algorithm),
          " keeps other states than before; all groups have the same, from the "
          "beginning on"));
    }
  }
  if (const auto check = RowOf(changed.algorithm).check) {
    const OptionFault fault = check(changed);
    if (!fault.text.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          fault.option == nullptr ? "" : absl::StrCat(fault.option, ": "),
          fault.text));
    }
  }
  *options = changed;
  return absl::OkStatus();
}

absl::Status SetOption(absl::string_view name, double value,
                       OptimizerOptions* options) {
  return SetOptions({{std::string(name), value}}, options);
}

absl::StatusOr<double> OptionOf(absl::string_view name,
                                const OptimizerOptions& options) {
  const absl::StatusOr<const Option*> found = Find(name, options.algorithm);
  if (!found.ok()) return found.status();
  return (*found)->In(options);
}

}  // namespace tessera
