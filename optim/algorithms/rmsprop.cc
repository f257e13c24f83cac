#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

constexpr Option kOptions[] = {
    {kLr, 1e-2},  {kWeightDecay, 0}, {kMaximize, 0}, {kEmaDecay, 0},
    {kEps, 1e-8}, {kMomentum, 0},    {kAlpha, 0.99}, {kCentered, 0}};

void Set(const OptimizerOptions& o, double, StepCoefficients* k) {
  using F = RmsPropFormula<true, true>;
  double* const c = k->values;
  c[F::kL2] = o.weight_decay;
  c[F::kMinusRate] = -o.lr;
  c[F::kAlpha] = o.alpha;
  c[F::kSquareWeight] = 1 - o.alpha;
  c[F::kEps] = o.eps;
  c[F::kKept] = o.momentum;
}

Formula FormulaOf(const OptimizerOptions& o) {
  if (o.centered) {
    return o.momentum != 0 ? Formula::kRmsPropCenteredMomentum
                           : Formula::kRmsPropCentered;
  }
  return o.momentum != 0 ? Formula::kRmsPropMomentum : Formula::kRmsProp;
}

}  // namespace

constexpr AlgorithmRow kRmsPropRow = {.name = "RMSprop",
                                      .options = kOptions,
                                      .formula = FormulaOf,
                                      .coefficients = Set};

}  // namespace tessera
