#include "optim/kernels/option_names.h"

#include <cmath>
#include <cstdint>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/edit_distance.h"
#include "optim/kernels/element_step.h"

namespace tessera {
namespace {

constexpr unsigned Of(Algorithm algorithm) {
  return 1u << static_cast<unsigned>(algorithm);
}
constexpr unsigned kCustom = Of(Algorithm::kCustom);
constexpr unsigned kAdams =
    Of(Algorithm::kAdamW) | Of(Algorithm::kAdam) | kCustom;
constexpr unsigned kBeta1s =
    kAdams | Of(Algorithm::kLion) | Of(Algorithm::kLamb);
constexpr unsigned kScheduleFree = Of(Algorithm::kScheduleFree);
constexpr unsigned kAll = ~0u;
constexpr unsigned kAllButOfRate = kAll & ~Of(Algorithm::kCustomOfRate);

struct Option {
  const char* name;
  unsigned algorithms;
  std::variant<double OptimizerOptions::*, bool OptimizerOptions::*> member;
  // A number is finite, at least (or above) the first and below the second.
  double least = 0, below = HUGE_VAL;
  bool above = false;
};

const Option kOptions[] = {
    {"lr", kAll, &OptimizerOptions::lr},
    {"weight_decay", kAllButOfRate, &OptimizerOptions::weight_decay},
    {"maximize", kAllButOfRate, &OptimizerOptions::maximize},
    {"ema_decay", kAll & ~kScheduleFree, &OptimizerOptions::ema_decay, 0, 1},
    {"beta1", kBeta1s, &OptimizerOptions::beta1, 0, 1},
    {"beta1", kScheduleFree, &OptimizerOptions::beta1, 0, 1, /*above=*/true},
    {"beta2", kBeta1s | kScheduleFree, &OptimizerOptions::beta2, 0, 1},
    // Beyond, weights of averages leave the range of float64.
    {"r", kScheduleFree, &OptimizerOptions::r, 0, 16},
    {"weight_lr_power", kScheduleFree, &OptimizerOptions::weight_lr_power, 0,
     16},
    {"eps",
     kAdams | Of(Algorithm::kAdagrad) | Of(Algorithm::kRmsProp) |
         Of(Algorithm::kLamb) | kScheduleFree,
     &OptimizerOptions::eps, 0, HUGE_VAL, /*above=*/true},
    {"bias_correction", kAdams | Of(Algorithm::kLamb),
     &OptimizerOptions::bias_correction},
    {"amsgrad", kAdams, &OptimizerOptions::amsgrad},
    {"momentum",
     Of(Algorithm::kSgd) | Of(Algorithm::kRmsProp) | Of(Algorithm::kMuon) |
         kCustom,
     &OptimizerOptions::momentum},
    {"dampening", Of(Algorithm::kSgd) | kCustom, &OptimizerOptions::dampening,
     -HUGE_VAL},
    {"nesterov", Of(Algorithm::kSgd) | Of(Algorithm::kMuon) | kCustom,
     &OptimizerOptions::nesterov},
    {"alpha", Of(Algorithm::kRmsProp) | kCustom, &OptimizerOptions::alpha, 0,
     1},
    {"centered", Of(Algorithm::kRmsProp) | kCustom,
     &OptimizerOptions::centered},
    {"lr_decay", Of(Algorithm::kAdagrad) | kCustom,
     &OptimizerOptions::lr_decay},
    {"initial_accumulator_value", Of(Algorithm::kAdagrad) | kCustom,
     &OptimizerOptions::initial_accumulator_value},
    {"min_coeff", Of(Algorithm::kLamb) | kCustom, &OptimizerOptions::min_coeff},
    {"max_coeff", Of(Algorithm::kLamb) | kCustom, &OptimizerOptions::max_coeff,
     0, HUGE_VAL, /*above=*/true},
    {"eps", Of(Algorithm::kAdafactor), &OptimizerOptions::eps},
    {"eps2", Of(Algorithm::kAdafactor), &OptimizerOptions::eps2},
    {"beta2_decay", Of(Algorithm::kAdafactor), &OptimizerOptions::beta2_decay,
     -HUGE_VAL, 0},
    {"d", Of(Algorithm::kAdafactor), &OptimizerOptions::d, 1},
};

absl::StatusOr<const Option*> Find(absl::string_view name,
                                   Algorithm algorithm) {
  for (const Option& option : kOptions) {
    if (name == option.name && (option.algorithms & Of(algorithm)) != 0) {
      return &option;
    }
  }
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
  if (const auto* number =
          std::get_if<double OptimizerOptions::*>(&option.member)) {
    const absl::Status in_range = CheckRange(option, value);
    if (in_range.ok()) options->*(*number) = value;
    return in_range;
  }
  if (value != 0 && value != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("option '", name, "': expected 0 or 1, got ", value));
  }
  options->*(std::get<bool OptimizerOptions::*>(option.member)) = value != 0;
  return absl::OkStatus();
}

}  // namespace

const char* NameOf(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kAdamW:
      return "AdamW";
    case Algorithm::kAdam:
      return "Adam";
    case Algorithm::kSgd:
      return "SGD";
    case Algorithm::kAdagrad:
      return "Adagrad";
    case Algorithm::kRmsProp:
      return "RMSprop";
    case Algorithm::kLion:
      return "Lion";
    case Algorithm::kLamb:
      return "Lamb";
    case Algorithm::kMuon:
      return "Muon";
    case Algorithm::kAdafactor:
      return "Adafactor";
    case Algorithm::kScheduleFree:
      return "AdamWScheduleFree";
    case Algorithm::kCustom:
    case Algorithm::kCustomOfRate:
      return "Custom";
  }
}

std::vector<std::string> OptionNames(Algorithm algorithm) {
  std::vector<std::string> names;
  for (const Option& option : kOptions) {
    if ((option.algorithms & Of(algorithm)) != 0) names.push_back(option.name);
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
  if (changed.algorithm == Algorithm::kSgd && changed.nesterov &&
      (changed.momentum == 0 || changed.dampening != 0)) {
    return absl::InvalidArgumentError(
        "nesterov: expected a momentum above 0 and no dampening with it");
  }
  if (changed.min_coeff > changed.max_coeff) {
    return absl::InvalidArgumentError(
        absl::StrCat("min_coeff: expected at most max_coeff, ",
                     changed.max_coeff, ", got ", changed.min_coeff));
  }
  if (changed.libtorch_exact &&
      (changed.maximize || !changed.bias_correction)) {
    return absl::InvalidArgumentError(
        "expected bias_correction and no maximize with "
        "precision.libtorch_exact");
  }
  if (changed.libtorch_fused && !changed.bias_correction) {
    return absl::InvalidArgumentError(
        "expected bias_correction with precision.libtorch_fused");
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
  const auto& member = (*found)->member;
  if (const auto* number = std::get_if<double OptimizerOptions::*>(&member)) {
    return options.*(*number);
  }
  return options.*(std::get<bool OptimizerOptions::*>(member)) ? 1.0 : 0.0;
}

}  // namespace tessera
