// Schedule-free AdamW; weight decay as AdamW's, where gradients are taken.
#include <cmath>

#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

// The average is found by 1 / beta1. Beyond 16, weights of averages leave the
// range of float64.
constexpr Option kOptions[] = {
    {kLr, 2.5e-3},
    {kWeightDecay, 0},
    {kMaximize, 0},
    {{"beta1", &OptimizerOptions::beta1, 0, 1, /*above=*/true}, 0.9},
    {kBeta2, 0.999},
    {{"r", &OptimizerOptions::r, 0, 16}, 0},
    {{"weight_lr_power", &OptimizerOptions::weight_lr_power, 0, 16}, 2},
    {kEps, 1e-8}};

void Set(const OptimizerOptions& o, double step, StepCoefficients* k) {
  using F = ScheduleFreeFormula;
  double* const c = k->values;
  c[F::kL2] = o.weight_decay;
  c[F::kBeta2] = o.beta2;
  c[F::kSquareWeight] = 1 - o.beta2;
  c[F::kCorrection] = std::sqrt(1 - std::pow(o.beta2, step));
  c[F::kEps] = o.eps;
  c[F::kShare] = o.average_share;
  c[F::kMinusRateOfY] = -(o.lr * (1 - o.beta1 * (1 - o.average_share)));
  c[F::kMinusRate] = -o.lr;
  k->variant = step == 1;
}

}  // namespace

constexpr AlgorithmRow kScheduleFreeRow = {
    .name = "AdamWScheduleFree",
    .options = kOptions,
    .formula = [](const OptimizerOptions&) { return Formula::kScheduleFree; },
    .coefficients = Set,
    // No bits of z may be lost.
    .why_float32 =
        " with AdamWScheduleFree, whose state z is as good as a master",
    .averages = true};

}  // namespace tessera
