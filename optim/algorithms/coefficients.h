// Computes what a step needs from options and its number: a formula, its
// states, and its coefficients in float64.
#ifndef OPTIM_ALGORITHMS_COEFFICIENTS_H_
#define OPTIM_ALGORITHMS_COEFFICIENTS_H_

#include <cstdint>

#include "optim/algorithms/optimizer_options.h"
#include "optim/formulas/formula.h"
#include "optim/formulas/formulas.h"

namespace tessera {

// Returns the formula of an algorithm; for LAMB, Muon and Adafactor that of the
// direction.
Formula FormulaOf(const OptimizerOptions& options);
bool IsDirection(Formula formula);
// Returns the formula's name in checkpoints: "adamw", "sgd_momentum".
const char* NameOf(Formula formula);

struct StepState {
  const char* name = nullptr;  // as checkpoints call it: "exp_avg"
  bool non_negative = false;
};
// The `count` states of a formula, in its order, except those with a shape of
// their own (optim/kernels/shaped_states.h).
struct StepStates {
  StepState states[kMaxStates];
  int count = 0;
};
StepStates StatesOf(Formula formula);
// Returns the number of states, also for a program's own optimizer.
int StateCountOf(const OptimizerOptions& options);

// Returns the seed of a parameter's step, by its number in the model.
uint64_t SeedOf(int64_t parameter, int64_t step);
// Returns a step's coefficients. `step` counts from 1.
StepCoefficients CoefficientsOf(const OptimizerOptions& options, int64_t step,
                                double gradient_factor = 1, uint64_t seed = 0);
// Returns the coefficients of a descent of masters along a direction, by
// `scale` times the rate. REQUIRES: the algorithm is a directed one.
StepCoefficients DescentOf(const OptimizerOptions& options, int64_t step,
                           double scale);

}  // namespace tessera
#endif  // OPTIM_ALGORITHMS_COEFFICIENTS_H_
