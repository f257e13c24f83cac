// AlgorithmRow: all that is known of one optimizer besides its formula
// (optim/formulas/formulas.h) and its hyperparameters' place
// (optim/algorithms/optimizer_options.h). Configurations are checked and
// completed by it, groups and calls set options by it, steps get their numbers
// from it. It is plain data and functions of numbers: no torch, no shards.
#ifndef OPTIM_ALGORITHMS_ALGORITHM_H_
#define OPTIM_ALGORITHMS_ALGORITHM_H_

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/algorithms/table.h"
#include "optim/formulas/formula.h"
#include "optim/formulas/formulas.h"

namespace tessera {

// A hyperparameter that groups and calls may set, by the name that torch::optim
// and DeepSpeed give it, and the fields of proto::OptimizerParams have, too.
// Either a number or a flag (0 or 1).
struct OptionKind {
  // Finite, at least (or above) `least` and below `below`.
  constexpr OptionKind(const char* name, double OptimizerOptions::*number,
                       double least = 0, double below = HUGE_VAL,
                       bool above = false)
      : name(name), number(number), least(least), below(below), above(above) {}
  constexpr OptionKind(const char* name, bool OptimizerOptions::*flag)
      : name(name), flag(flag) {}

  double In(const OptimizerOptions& options) const {
    return number != nullptr ? options.*number : options.*flag ? 1.0 : 0.0;
  }
  void Set(double to, OptimizerOptions* options) const {
    if (number != nullptr) {
      options->*number = to;
    } else {
      options->*flag = to != 0;
    }
  }

  const char* name;
  double OptimizerOptions::*number = nullptr;
  bool OptimizerOptions::*flag = nullptr;
  double least = 0, below = HUGE_VAL;
  bool above = false;
};

// Options that several algorithms have.
constexpr OptionKind kLr = {"lr", &OptimizerOptions::lr};
constexpr OptionKind kWeightDecay = {"weight_decay",
                                     &OptimizerOptions::weight_decay};
constexpr OptionKind kMaximize = {"maximize", &OptimizerOptions::maximize};
constexpr OptionKind kEmaDecay = {"ema_decay", &OptimizerOptions::ema_decay, 0,
                                  1};
constexpr OptionKind kBeta1 = {"beta1", &OptimizerOptions::beta1, 0, 1};
constexpr OptionKind kBeta2 = {"beta2", &OptimizerOptions::beta2, 0, 1};
constexpr OptionKind kEps = {"eps", &OptimizerOptions::eps, 0, HUGE_VAL, true};
constexpr OptionKind kBiasCorrection = {"bias_correction",
                                        &OptimizerOptions::bias_correction};
constexpr OptionKind kAmsGrad = {"amsgrad", &OptimizerOptions::amsgrad};
constexpr OptionKind kMomentum = {"momentum", &OptimizerOptions::momentum};
constexpr OptionKind kDampening = {"dampening", &OptimizerOptions::dampening,
                                   -HUGE_VAL};
constexpr OptionKind kNesterov = {"nesterov", &OptimizerOptions::nesterov};
constexpr OptionKind kAlpha = {"alpha", &OptimizerOptions::alpha, 0, 1};
constexpr OptionKind kCentered = {"centered", &OptimizerOptions::centered};
constexpr OptionKind kLrDecay = {"lr_decay", &OptimizerOptions::lr_decay};
constexpr OptionKind kInitialAccumulatorValue = {
    "initial_accumulator_value", &OptimizerOptions::initial_accumulator_value};
constexpr OptionKind kMinCoeff = {"min_coeff", &OptimizerOptions::min_coeff};
constexpr OptionKind kMaxCoeff = {"max_coeff", &OptimizerOptions::max_coeff, 0,
                                  HUGE_VAL, true};

// An option of an algorithm.
struct Option : OptionKind {
  // The default; absent: where a configuration does not set it, it stays
  // absent, and is 0 here.
  std::optional<double> value;
};

// A parameter of configurations that groups and calls cannot set. Its default
// is `number`, or `text`, or the value of the field `like`.
struct ConfigField {
  const char* name;
  double number = 0;
  const char* text = nullptr;
  const char* like = nullptr;
};

// What is wrong with options that are each in their range; empty text: nothing.
struct OptionFault {
  const char* option = nullptr;  // null: several
  std::string text;
};

// What the completion of one parameter's direction may depend on.
struct DirectedParameter {
  int64_t numel = 0;
  int64_t rows = 0, columns = 0;     // of a matrix
  double master = 0, direction = 0;  // norms
};

// A directed step (optim/directed_step.h): its descent.
struct DirectedRow {
  // Masters are multiplied by 1 - lr * weight_decay; otherwise the direction
  // includes their decay.
  bool decays;
  double (*rate)(const OptimizerOptions& o, double step);
  // A factor of the rate.
  double (*scale)(const OptimizerOptions& o, const DirectedParameter& p);
};

// The algorithm of the parameters that an algorithm is not for, and those of
// its options whose defaults differ then.
struct RestRow {
  Algorithm algorithm;
  absl::Span<const Option> options;
};

struct AlgorithmRow {
  // optimizer.type, as it is spelled; the oracle's name of it (verify/), too.
  const char* name;
  absl::Span<const Option> options;  // in the order of messages
  absl::Span<const ConfigField> fields = {};
  // The formula that options select. Another formula has other states.
  Formula (*formula)(const OptimizerOptions& o);
  // Sets `values` and `variant` of the step of that number, which counts from
  // 1. Null: no formula has any.
  void (*coefficients)(const OptimizerOptions& o, double step,
                       StepCoefficients* k) = nullptr;
  // Checks options that must fit together. Null: none must.
  OptionFault (*check)(const OptimizerOptions& o) = nullptr;
  const DirectedRow* directed = nullptr;
  const RestRow* rest = nullptr;
  // Why states must be float32: the end of a message, "expected fp32". Null:
  // they may have fewer bits.
  const char* why_float32 = nullptr;
  // Parameters are the points where gradients are taken; their average is
  // computed from them (optim/algorithms/average_weights.h).
  bool averages = false;

  const Option* Find(absl::string_view option) const {
    for (const Option& o : options) {
      if (option == o.name) return &o;
    }
    return nullptr;
  }
  // Finds an option that its configuration may have, first among the rest's.
  const Option* FindOrRest(absl::string_view option) const {
    if (rest == nullptr) return Find(option);
    for (const Option& o : rest->options) {
      if (option == o.name) return &o;
    }
    return Find(option);
  }
};

#define TESSERA_ROW(name) extern const AlgorithmRow k##name##Row;
TESSERA_ALGORITHMS(TESSERA_ROW)
#undef TESSERA_ROW

// AlgorithmRow::check for algorithms that have kMinCoeff and kMaxCoeff.
OptionFault CheckTrustRatio(const OptimizerOptions& o);

}  // namespace tessera
#endif  // OPTIM_ALGORITHMS_ALGORITHM_H_
