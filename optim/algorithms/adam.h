// Coefficients of a step of AdamW and Adam, which LAMB uses, too.
#ifndef OPTIM_ALGORITHMS_ADAM_H_
#define OPTIM_ALGORITHMS_ADAM_H_

#include "optim/algorithms/optimizer_options.h"
#include "optim/formulas/formula.h"

namespace tessera {

// Sets AdamFormula's coefficients, with `l2` those of Adam.
void SetAdam(const OptimizerOptions& o, double step, bool l2,
             StepCoefficients* k);

}  // namespace tessera
#endif  // OPTIM_ALGORITHMS_ADAM_H_
