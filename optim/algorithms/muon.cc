// Muon, of matrices; AdamW steps the rest.
#include <algorithm>
#include <cmath>

#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

constexpr Option kOptions[] = {{kLr, 1e-3},       {kWeightDecay, 0},
                               {kMaximize, 0},    {kEmaDecay, 0},
                               {kMomentum, 0.95}, {kNesterov, 1}};
constexpr ConfigField kFields[] = {
    {"ns_steps", 5},
    {.name = "muon_lr", .like = "lr"},
    {.name = "adam_lr", .like = "lr"},
    {.name = "ns_method", .text = "gram"},
    {.name = "adjust_lr_fn", .text = "original"}};
constexpr Option kRestOptions[] = {
    {kBeta1, 0.9}, {kBeta2, 0.95}, {kEps, 1e-10}};
constexpr RestRow kRest = {Algorithm::kAdamW, kRestOptions};

void Set(const OptimizerOptions& o, double, StepCoefficients* k) {
  using F = MuonFormula;
  k->values[F::kWeight] = 1 - o.momentum;
  k->values[F::kMomentum] = o.momentum;
  k->variant = o.nesterov;
}

// Keller Jordan's, or that which has the root mean square of AdamW's changes
// (Liu et al., "Muon is Scalable for LLM Training", 2025); torch.optim.Muon's
// adjust_lr_fn.
double ScaleOf(const OptimizerOptions& o, const DirectedParameter& p) {
  const auto r = static_cast<double>(p.rows);
  const auto c = static_cast<double>(p.columns);
  return o.match_rms_adamw ? 0.2 * std::sqrt(std::max(r, c))
                           : std::sqrt(std::max(1.0, r / c));
}

constexpr DirectedRow kDirected = {
    .decays = true,
    .rate = [](const OptimizerOptions& o, double) { return o.lr; },
    .scale = ScaleOf};

}  // namespace

constexpr AlgorithmRow kMuonRow = {
    .name = "Muon",
    .options = kOptions,
    .fields = kFields,
    .formula = [](const OptimizerOptions&) { return Formula::kMuonDirection; },
    .coefficients = Set,
    .directed = &kDirected,
    .rest = &kRest};

}  // namespace tessera
