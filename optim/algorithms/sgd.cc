#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

constexpr Option kOptions[] = {
    {kLr, 1e-3},    {kWeightDecay, 0}, {kMaximize, 0}, {kEmaDecay, 0},
    {kMomentum, 0}, {kDampening, 0},   {kNesterov, 0}};

void Set(const OptimizerOptions& o, double step, StepCoefficients* k) {
  using F = SgdFormula<true>;
  double* const c = k->values;
  c[F::kL2] = o.weight_decay;
  c[F::kMinusRate] = -o.lr;
  c[F::kKept] = step == 1 ? 0 : o.momentum;
  c[F::kAdded] = step == 1 ? 1 : 1 - o.dampening;
  c[F::kNesterov] = o.momentum;
  k->variant = o.nesterov;
}

OptionFault Check(const OptimizerOptions& o) {
  OptionFault fault;
  if (o.nesterov && (o.momentum == 0 || o.dampening != 0)) {
    fault.option = "nesterov";
    fault.text = "expected a momentum above 0 and no dampening with it";
  }
  return fault;
}

}  // namespace

constexpr AlgorithmRow kSgdRow = {
    .name = "SGD",
    .options = kOptions,
    .formula =
        [](const OptimizerOptions& o) {
          return o.momentum != 0 ? Formula::kSgdMomentum : Formula::kSgd;
        },
    .coefficients = Set,
    .check = Check};

}  // namespace tessera
