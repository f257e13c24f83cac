// AdamW, whose weight decay is of the weights, and Adam, which adds it to the
// gradient (L2).
#include "optim/algorithms/adam.h"

#include <cmath>

#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

constexpr Option kOptions[] = {
    {kLr, 1e-3},    {kWeightDecay, 0},    {kMaximize, 0},
    {kEmaDecay, 0}, {kBeta1, 0.9},        {kBeta2, 0.999},
    {kEps, 1e-8},   {kBiasCorrection, 1}, {kAmsGrad, 0}};
// It says which of the two, whatever the type is.
constexpr ConfigField kFields[] = {{"adam_w_mode", 1}};

// The operators of torch::optim are called for plain AdamW; libtorch's kernel
// has maximize, too.
OptionFault Check(const OptimizerOptions& o) {
  if (o.libtorch_exact && (o.maximize || !o.bias_correction)) {
    return {nullptr,
            "expected bias_correction and no maximize with "
            "precision.libtorch_exact"};
  }
  if (o.libtorch_fused && !o.bias_correction) {
    return {nullptr, "expected bias_correction with precision.libtorch_fused"};
  }
  return {};
}

}  // namespace

void SetAdam(const OptimizerOptions& o, double step, bool l2,
             StepCoefficients* k) {
  using F = AdamFormula<false, false>;  // the same of all four
  const double correction1 =
      o.bias_correction ? 1 - std::pow(o.beta1, step) : 1;
  const double correction2 =
      o.bias_correction ? 1 - std::pow(o.beta2, step) : 1;
  double* const c = k->values;
  c[F::kDecay] = l2 ? o.weight_decay : 1;
  if (!l2 && o.weight_decay != 0) c[F::kDecay] = 1 - o.lr * o.weight_decay;
  c[F::kWeight] = 1 - o.beta1;
  c[F::kBeta2] = o.beta2;
  c[F::kSquareWeight] = 1 - o.beta2;
  c[F::kCorrection] = std::sqrt(correction2);
  c[F::kEps] = o.eps;
  c[F::kMinusStepSize] = -(o.lr / correction1);
  k->variant = !(static_cast<float>(c[F::kWeight]) < 0.5f);
}

constexpr AlgorithmRow kAdamWRow = {
    .name = "AdamW",
    .options = kOptions,
    .fields = kFields,
    .formula =
        [](const OptimizerOptions& o) {
          return o.amsgrad ? Formula::kAdamWAmsGrad : Formula::kAdamW;
        },
    .coefficients =
        [](const OptimizerOptions& o, double step, StepCoefficients* k) {
          SetAdam(o, step, /*l2=*/false, k);
        },
    .check = Check};

constexpr AlgorithmRow kAdamRow = {
    .name = "Adam",
    .options = kOptions,
    .fields = kFields,
    .formula =
        [](const OptimizerOptions& o) {
          return o.amsgrad ? Formula::kAdamAmsGrad : Formula::kAdam;
        },
    .coefficients =
        [](const OptimizerOptions& o, double step, StepCoefficients* k) {
          SetAdam(o, step, /*l2=*/true, k);
        },
    .check = Check};

}  // namespace tessera
