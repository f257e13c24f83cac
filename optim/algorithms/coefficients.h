// What a step needs of options and its number: a formula, its states, and its
// numbers in float64.
#ifndef OPTIM_ALGORITHMS_COEFFICIENTS_H_
#define OPTIM_ALGORITHMS_COEFFICIENTS_H_

#include <cstdint>

#include "optim/algorithms/optimizer_options.h"
#include "optim/formulas/formula.h"
#include "optim/formulas/formulas.h"

namespace tessera {

// Of LAMB, Muon and Adafactor the direction.
Formula FormulaOf(const OptimizerOptions& options);
bool IsDirection(Formula formula);
// As checkpoints call it: "adamw", "sgd_momentum".
const char* NameOf(Formula formula);

struct StepState {
  const char* name = nullptr;  // as checkpoints call it: "exp_avg"
  bool non_negative = false;
};
// A formula's, in its order; `count` of them. (Not those with a shape of their
// own: optim/kernels/shaped_states.h.)
struct StepStates {
  StepState states[kMaxStates];
  int count = 0;
};
StepStates StatesOf(Formula formula);
// Their number, of a program's own optimizer, too.
int StateCountOf(const OptimizerOptions& options);

// `step` counts from 1.
StepCoefficients CoefficientsOf(const OptimizerOptions& options, int64_t step,
                                double gradient_factor = 1, uint64_t seed = 0);
// The descent along a direction: of masters, by `scale` times the rate.
// REQUIRES: the algorithm is a directed one.
StepCoefficients DescentOf(const OptimizerOptions& options, int64_t step,
                           double scale);

}  // namespace tessera
#endif  // OPTIM_ALGORITHMS_COEFFICIENTS_H_
