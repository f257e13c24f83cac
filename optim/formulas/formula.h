// What a formula of an optimizer is (optim/formulas/formulas.h has them all):
// a type F with what it does to one element, written once, for the vectors of
// three instruction sets (optim/kernels/step_loops.cc), for float64, and for
// GPUs.
//
//   F::kStates       how many states it has of each element, zeros before the
//                    first step
//   F::kStateNames   their names in checkpoints; those after kStates are unused
//   F::kNonNegative  bit s says that state s is never less than zero
//   F::kHasVariant   whether `variant` is looked at
//   F::Step(c, variant, g, &master, states)
//
// In Step, V is a float, or several: with + - * /, each rounded once, never
// fused; SquareRoot, MultiplyAdd(a, b, c) = a * b + c rounded once, Max and
// Sign (NaN of NaN), V::Of(x). C is one of them, or one that stands for all.
// `g` is the gradient times its factor. Coefficients are computed in float64
// (optim/algorithms) and rounded to V once. Of two NaNs an addition might
// return either, which is for the compiler to choose: who stores what a formula
// has changed makes every NaN one.
#ifndef OPTIM_FORMULAS_FORMULA_H_
#define OPTIM_FORMULAS_FORMULA_H_

#include <cstdint>

#ifdef __CUDACC__
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif

namespace tessera {

inline constexpr int kMaxStates = 3;        // of a formula
inline constexpr int kMaxCustomStates = 8;  // of a program's own optimizer
inline constexpr int kMaxCoefficients = 8;

// Coefficients that all elements of one step share.
struct StepCoefficients {
  double values[kMaxCoefficients] = {};  // the formula's
  bool variant = false;                  // the formula's
  double gradient_factor = 1;            // 1 changes no gradient
  double sign = 1;                       // of gradients; -1: maximize
  // The seed of the random bits: Note [Stochastic rounding], in
  // optim/kernels/element_step.h.
  uint64_t seed = 0;
  // The weight of new masters in StepRange::average.
  double average_weight = 0;
};

template <typename F>
TESSERA_HOST_DEVICE constexpr bool IsNonNegative(int state) {
  return (F::kNonNegative >> state & 1) != 0;
}

}  // namespace tessera
#endif  // OPTIM_FORMULAS_FORMULA_H_
