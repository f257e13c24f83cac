#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

constexpr Option kOptions[] = {{kLr, 1e-2},
                               {kWeightDecay, 0},
                               {kMaximize, 0},
                               {kEmaDecay, 0},
                               {kEps, 1e-10},
                               {kLrDecay, 0},
                               {kInitialAccumulatorValue, 0}};

void Set(const OptimizerOptions& o, double step, StepCoefficients* k) {
  using F = AdagradFormula;
  double* const c = k->values;
  c[F::kL2] = o.weight_decay;
  c[F::kMinusRate] = -(o.lr / (1 + (step - 1) * o.lr_decay));
  c[F::kInitial] = o.initial_accumulator_value;
  c[F::kEps] = o.eps;
}

}  // namespace

constexpr AlgorithmRow kAdagradRow = {
    .name = "Adagrad",
    .options = kOptions,
    .formula = [](const OptimizerOptions&) { return Formula::kAdagrad; },
    .coefficients = Set};

}  // namespace tessera
