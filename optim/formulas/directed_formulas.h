// The formulas of directed steps (optim/directed_step.h), in two halves: the
// first puts a direction in the place of the master, the second descends along
// what has become of it.
#ifndef OPTIM_FORMULAS_DIRECTED_FORMULAS_H_
#define OPTIM_FORMULAS_DIRECTED_FORMULAS_H_

#include "optim/formulas/formula.h"

namespace tessera {

// LAMB's direction, in place of the master:
//
//   exp_avg     lerp(exp_avg, g, 1 - beta1), one FMA
//   exp_avg_sq  fma(g, g * (1 - beta2), exp_avg_sq * beta2)
//   direction   exp_avg / (1 - beta1^step)
//               / (sqrt(exp_avg_sq) / sqrt(1 - beta2^step) + eps)
//               + weight_decay * master
//
// Source: You et al., "Large Batch Optimization for Deep Learning: Training
// BERT in 76 minutes", 2020.
struct LambFormula {
  static constexpr int kStates = 2;
  static constexpr const char* kStateNames[kMaxStates] = {"exp_avg",
                                                          "exp_avg_sq"};
  static constexpr unsigned kNonNegative = 0b10;
  static constexpr bool kHasVariant = true;
  enum : int {
    kL2,
    kWeight,
    kBeta2,
    kSquareWeight,
    kCorrection,
    kEps,
    kCorrection1
  };
  template <typename C, typename V>
  TESSERA_HOST_DEVICE static void Step(const C* c, bool from_gradient, V g,
                                       V* master, V* state) {
    const C weight = from_gradient ? c[kWeight] - C::Of(1) : c[kWeight];
    const V m = MultiplyAdd(weight, g - state[0], from_gradient ? g : state[0]);
    const V v = MultiplyAdd(g, g * c[kSquareWeight], state[1] * c[kBeta2]);
    state[0] = m;
    state[1] = v;
    const V denominator = SquareRoot(v) / c[kCorrection] + c[kEps];
    *master = MultiplyAdd(c[kL2], *master, m / c[kCorrection1] / denominator);
  }
};

// Muon's direction before it is made orthogonal, in place of the master:
//
//   momentum_buffer  lerp(momentum_buffer, g, 1 - momentum)
//   direction        with Nesterov lerp(g, momentum_buffer, momentum), else
//                    momentum_buffer
//
// Source: Jordan, "Muon: An optimizer for hidden layers in neural networks",
// 2024; torch.optim.Muon.
struct MuonFormula {
  static constexpr int kStates = 1;
  static constexpr const char* kStateNames[kMaxStates] = {"momentum_buffer"};
  static constexpr unsigned kNonNegative = 0;
  static constexpr bool kHasVariant = true;
  enum : int { kWeight, kMomentum };
  template <typename C, typename V>
  TESSERA_HOST_DEVICE static void Step(const C* c, bool nesterov, V g,
                                       V* master, V* state) {
    const V buffer = MultiplyAdd(c[kWeight], g - state[0], state[0]);
    state[0] = buffer;
    *master = nesterov ? MultiplyAdd(c[kMomentum], buffer - g, g) : buffer;
  }
};

// The second half: `g` is the direction.
//
//   master  master * (1 - lr * weight_decay) - lr * scale * direction
struct DescentFormula {
  static constexpr int kStates = 0;
  static constexpr const char* kStateNames[kMaxStates] = {};
  static constexpr unsigned kNonNegative = 0;
  static constexpr bool kHasVariant = false;
  enum : int { kDecay, kMinusRate };
  template <typename C, typename V>
  TESSERA_HOST_DEVICE static void Step(const C* c, bool, V g, V* master, V*) {
    *master = MultiplyAdd(c[kMinusRate], g, *master * c[kDecay]);
  }
};

// The directions, as formulas.h lists formulas. Adafactor's is not elementwise
// (optim/factored/adafactor.h): its loop is never used, and it has no states of
// each element.
#define TESSERA_DIRECTIONS(FORMULA)            \
  FORMULA(kLambDirection, "lamb", LambFormula) \
  FORMULA(kMuonDirection, "muon", MuonFormula) \
  FORMULA(kAdafactorDirection, "adafactor", DescentFormula)

}  // namespace tessera
#endif  // OPTIM_FORMULAS_DIRECTED_FORMULAS_H_
