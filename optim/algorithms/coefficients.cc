#include "optim/algorithms/coefficients.h"

#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

// The average begins with the first new master.
void SetAverage(const OptimizerOptions& o, int64_t step, StepCoefficients* k) {
  if (o.ema_decay > 0) k->average_weight = step == 1 ? 1 : 1 - o.ema_decay;
}

uint64_t Mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

}  // namespace

const AlgorithmRow& RowOf(Algorithm algorithm) {
  switch (algorithm) {
#define TESSERA_ROW(name)  \
  case Algorithm::k##name: \
    return k##name##Row;
    TESSERA_ALGORITHMS(TESSERA_ROW)
#undef TESSERA_ROW
  }
}

const char* NameOf(Algorithm algorithm) { return RowOf(algorithm).name; }

std::optional<Algorithm> FindAlgorithm(absl::string_view name) {
#define TESSERA_ROW(row) \
  if (name == k##row##Row.name) return Algorithm::k##row;
  TESSERA_ALGORITHMS(TESSERA_ROW)
#undef TESSERA_ROW
  return std::nullopt;
}

bool TakesNarrowMasters(Algorithm algorithm) {
  const AlgorithmRow& row = RowOf(algorithm);
  return row.directed == nullptr && row.why_float32 == nullptr;
}

std::vector<std::string> AlgorithmNames() {
  std::vector<std::string> names;
#define TESSERA_ROW(row)                                    \
  if (FindAlgorithm(k##row##Row.name) == Algorithm::k##row) \
    names.push_back(k##row##Row.name);
  TESSERA_ALGORITHMS(TESSERA_ROW)
#undef TESSERA_ROW
  return names;
}

Formula FormulaOf(const OptimizerOptions& o) {
  return RowOf(o.algorithm).formula(o);
}

bool IsDirection(Formula formula) {
#define TESSERA_FORMULA(number, name, ...) \
  if (formula == Formula::number) return true;
  TESSERA_DIRECTIONS(TESSERA_FORMULA)
#undef TESSERA_FORMULA
  return false;
}

const char* NameOf(Formula formula) {
  switch (formula) {
#define TESSERA_FORMULA(number, name, ...) \
  case Formula::number:                    \
    return name;
    TESSERA_FORMULAS(TESSERA_FORMULA)
#undef TESSERA_FORMULA
  }
}

StepStates StatesOf(Formula formula) {
  StepStates states;
  VisitFormula(formula, [&](auto f) {
    using F = decltype(f);
    states.count = F::kStates;
    for (int s = 0; s < F::kStates; ++s) {
      states.states[s] = {F::kStateNames[s], IsNonNegative<F>(s)};
    }
  });
  return states;
}

int StateCountOf(const OptimizerOptions& o) {
  const Formula formula = FormulaOf(o);
  return formula == Formula::kCustom ? o.custom_states
                                     : StatesOf(formula).count;
}

uint64_t SeedOf(int64_t parameter, int64_t step) {
  return Mixed(Mixed(static_cast<uint64_t>(parameter) + 0x9e3779b97f4a7c15u) ^
               static_cast<uint64_t>(step));
}

StepCoefficients CoefficientsOf(const OptimizerOptions& o, int64_t step,
                                double gradient_factor, uint64_t seed) {
  StepCoefficients k;
  const AlgorithmRow& row = RowOf(o.algorithm);
  if (row.coefficients != nullptr) {
    row.coefficients(o, static_cast<double>(step), &k);
  }
  SetAverage(o, step, &k);
  k.gradient_factor = gradient_factor;
  k.sign = o.maximize ? -1 : 1;
  k.seed = seed;
  return k;
}

StepCoefficients DescentOf(const OptimizerOptions& o, int64_t step,
                           double scale) {
  using F = DescentFormula;
  StepCoefficients k;
  SetAverage(o, step, &k);
  const DirectedRow& directed = *RowOf(o.algorithm).directed;
  const bool decays = directed.decays && o.weight_decay != 0;
  const double rate = directed.rate(o, static_cast<double>(step));
  k.values[F::kDecay] = decays ? 1 - o.lr * o.weight_decay : 1;
  k.values[F::kMinusRate] = -(rate * scale);
  return k;
}

}  // namespace tessera
