// Adafactor; its direction: optim/factored/adafactor.h.
#include <algorithm>
#include <cmath>

#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

constexpr Option kOptions[] = {
    {kLr, 1e-2},
    {kWeightDecay, 0},
    {kMaximize, 0},
    {kEmaDecay, 0},
    {{"eps", &OptimizerOptions::eps}, std::nullopt},
    {{"eps2", &OptimizerOptions::eps2}, 1e-3},
    {{"beta2_decay", &OptimizerOptions::beta2_decay, -HUGE_VAL, 0}, -0.8},
    {{"d", &OptimizerOptions::d, 1}, 1}};

// From the norms of a parameter and its direction.
double ScaleOf(const OptimizerOptions& o, const DirectedParameter& p) {
  if (p.numel == 0) return 1;
  const double root = std::sqrt(static_cast<double>(p.numel));
  return std::max(o.eps2, p.master / root) /
         std::max(1.0, p.direction / (root * o.d));
}

constexpr DirectedRow kDirected = {
    .decays = true,
    .rate = [](const OptimizerOptions& o,
               double step) { return std::min(o.lr, 1 / std::sqrt(step)); },
    .scale = ScaleOf};

}  // namespace

constexpr AlgorithmRow kAdafactorRow = {
    .name = "Adafactor",
    .options = kOptions,
    .formula =
        [](const OptimizerOptions&) { return Formula::kAdafactorDirection; },
    .directed = &kDirected,
    .why_float32 = " with Adafactor, whose states are few"};

}  // namespace tessera
