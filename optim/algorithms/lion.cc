#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

constexpr Option kOptions[] = {{kLr, 1e-3},    {kWeightDecay, 0},
                               {kMaximize, 0}, {kEmaDecay, 0},
                               {kBeta1, 0.9},  {kBeta2, 0.99}};

void Set(const OptimizerOptions& o, double, StepCoefficients* k) {
  using F = LionFormula;
  double* const c = k->values;
  c[F::kDecay] = 1 - o.lr * o.weight_decay;
  c[F::kMinusRate] = -o.lr;
  c[F::kBeta1] = o.beta1;
  c[F::kWeight1] = 1 - o.beta1;
  c[F::kBeta2] = o.beta2;
  c[F::kWeight2] = 1 - o.beta2;
}

}  // namespace

constexpr AlgorithmRow kLionRow = {
    .name = "Lion",
    .options = kOptions,
    .formula = [](const OptimizerOptions&) { return Formula::kLion; },
    .coefficients = Set};

}  // namespace tessera
