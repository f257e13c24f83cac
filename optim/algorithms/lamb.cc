// LAMB: Adam's direction, as far as the norm of the parameter says.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "optim/algorithms/adam.h"
#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

constexpr Option kOptions[] = {
    {kLr, 1e-3},       {kWeightDecay, 0}, {kMaximize, 0}, {kEmaDecay, 0},
    {kBeta1, 0.9},     {kBeta2, 0.999},   {kEps, 1e-8},   {kBiasCorrection, 1},
    {kMinCoeff, 0.01}, {kMaxCoeff, 10}};

void Set(const OptimizerOptions& o, double step, StepCoefficients* k) {
  using F = LambFormula;
  SetAdam(o, step, /*l2=*/true, k);  // the same but for the last
  static_assert(static_cast<int>(F::kEps) ==
                    static_cast<int>(AdamFormula<true, false>::kEps),
                "in one order");
  k->values[F::kCorrection1] =
      o.bias_correction ? 1 - std::pow(o.beta1, step) : 1;
}

// The trust ratio.
double ScaleOf(const OptimizerOptions& o, const DirectedParameter& p) {
  return p.master > 0 && p.direction > 0
             ? std::clamp(p.master / p.direction, o.min_coeff, o.max_coeff)
             : 1;
}

constexpr DirectedRow kDirected = {
    .decays = false,
    .rate = [](const OptimizerOptions& o, double) { return o.lr; },
    .scale = ScaleOf};

}  // namespace

OptionFault CheckTrustRatio(const OptimizerOptions& o) {
  OptionFault fault;
  if (o.min_coeff > o.max_coeff) {
    fault.option = "min_coeff";
    fault.text = absl::StrCat("expected at most max_coeff, ", o.max_coeff,
                              ", got ", o.min_coeff);
  }
  return fault;
}

constexpr AlgorithmRow kLambRow = {
    .name = "Lamb",
    .options = kOptions,
    .formula = [](const OptimizerOptions&) { return Formula::kLambDirection; },
    .coefficients = Set,
    .check = CheckTrustRatio,
    .directed = &kDirected};

}  // namespace tessera
