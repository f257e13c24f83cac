// The formulas of the optimizers (optim/formulas/formula.h says what one is)
// and their table.
#ifndef OPTIM_FORMULAS_FORMULAS_H_
#define OPTIM_FORMULAS_FORMULAS_H_

#include <cstdint>

#include "optim/formulas/directed_formulas.h"
#include "optim/formulas/formula.h"

namespace tessera {

// With kL2 weight decay is added to the gradient.
template <bool kL2, typename V, typename C>
TESSERA_HOST_DEVICE inline V Decayed(V g, V master, C l2) {
  if constexpr (kL2) return MultiplyAdd(l2, master, g);
  return g;
}

// AdamW and Adam:
//
//   exp_avg     lerp(exp_avg, g, 1 - beta1), one FMA
//   exp_avg_sq  fma(g, g * (1 - beta2), exp_avg_sq * beta2)
//   max         with AMSGrad, of exp_avg_sq, which it stands for below
//   master      master * (1 - lr * weight_decay)
//               + -(lr / (1 - beta1^step)) * exp_avg
//               / (sqrt(exp_avg_sq) / sqrt(1 - beta2^step) + eps)
//
// These are the operations of the vectorised body of libtorch's fused AdamW
// where it is compiled for AVX2, so the bits are those of
// torch.optim.AdamW(fused=True), except for elements that libtorch does in its
// scalar tail, which rounds otherwise.
//
// Sources: Kingma & Ba, "Adam", 2015; Loshchilov & Hutter, "Decoupled Weight
// Decay Regularization", 2019; Reddi et al., "On the Convergence of Adam and
// Beyond", 2018 (AMSGrad).
template <bool kL2, bool kAmsGrad>
struct AdamFormula {
  static constexpr int kStates = kAmsGrad ? 3 : 2;
  static constexpr const char* kStateNames[kMaxStates] = {
      "exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  static constexpr unsigned kNonNegative = kAmsGrad ? 0b110 : 0b10;
  static constexpr bool kHasVariant = true;
  enum : int {
    kDecay,  // of masters; with kL2 what is added of them to gradients
    kWeight,
    kBeta2,
    kSquareWeight,
    kCorrection,
    kEps,
    kMinusStepSize
  };
  template <typename C, typename V>
  TESSERA_HOST_DEVICE static void Step(const C* c, bool from_gradient, V g,
                                       V* master, V* state) {
    g = Decayed<kL2>(g, *master, c[kDecay]);
    // From the nearer end, as a lerp does it.
    const C weight = from_gradient ? c[kWeight] - C::Of(1) : c[kWeight];
    const V m = MultiplyAdd(weight, g - state[0], from_gradient ? g : state[0]);
    const V v = MultiplyAdd(g, g * c[kSquareWeight], state[1] * c[kBeta2]);
    state[0] = m;
    state[1] = v;
    V square = v;
    if constexpr (kAmsGrad) square = state[2] = Max(state[2], v);
    const V denominator = SquareRoot(square) / c[kCorrection] + c[kEps];
    const V kept = kL2 ? *master : *master * c[kDecay];
    *master = kept + c[kMinusStepSize] * m / denominator;
  }
};

// SGD:
//
//   d       g + weight_decay * master
//   buffer  momentum * buffer + (1 - dampening) * d; d at the first step
//   master  master - lr * buffer; with Nesterov - lr * (d + momentum * buffer)
//
// Source: torch.optim.SGD; Sutskever et al., 2013.
template <bool kMomentum>
struct SgdFormula {
  static constexpr int kStates = kMomentum ? 1 : 0;
  static constexpr const char* kStateNames[kMaxStates] = {"momentum_buffer"};
  static constexpr unsigned kNonNegative = 0;
  static constexpr bool kHasVariant = kMomentum;
  enum : int { kL2, kMinusRate, kKept, kAdded, kNesterov };
  template <typename C, typename V>
  TESSERA_HOST_DEVICE static void Step(const C* c, bool nesterov, V g,
                                       V* master, V* state) {
    V d = MultiplyAdd(c[kL2], *master, g);
    if constexpr (kMomentum) {
      const V buffer = MultiplyAdd(c[kKept], state[0], c[kAdded] * d);
      state[0] = buffer;
      d = nesterov ? MultiplyAdd(c[kNesterov], buffer, d) : buffer;
    }
    *master = MultiplyAdd(c[kMinusRate], d, *master);
  }
};

// Adagrad:
//
//   d       g + weight_decay * master
//   sum     sum + d * d
//   master  master - lr / (1 + (step - 1) * lr_decay)
//                    * d / (sqrt(initial_accumulator_value + sum) + eps)
//
// Source: torch.optim.Adagrad; Duchi et al., 2011. (The initial value is no
// part of the state.)
struct AdagradFormula {
  static constexpr int kStates = 1;
  static constexpr const char* kStateNames[kMaxStates] = {"sum"};
  static constexpr unsigned kNonNegative = 1;
  static constexpr bool kHasVariant = false;
  enum : int { kL2, kMinusRate, kInitial, kEps };
  template <typename C, typename V>
  TESSERA_HOST_DEVICE static void Step(const C* c, bool, V g, V* master,
                                       V* state) {
    const V d = MultiplyAdd(c[kL2], *master, g);
    const V sum = MultiplyAdd(d, d, state[0]);
    state[0] = sum;
    const V denominator = SquareRoot(c[kInitial] + sum) + c[kEps];
    *master = *master + c[kMinusRate] * d / denominator;
  }
};

// RMSprop:
//
//   d           g + weight_decay * master
//   square_avg  alpha * square_avg + (1 - alpha) * d * d
//   grad_avg    centered: lerp(grad_avg, d, 1 - alpha)
//   buffer      with momentum: momentum * buffer
//               + d / (sqrt(square_avg - grad_avg^2) + eps)
//   master      master - lr * buffer, or of what is added to it
//
// Source: torch.optim.RMSprop; Hinton's lecture 6e, 2012; Graves, 2013
// (centered).
template <bool kCentered, bool kMomentum>
struct RmsPropFormula {
  static constexpr int kStates = 1 + (kCentered ? 1 : 0) + (kMomentum ? 1 : 0);
  static constexpr const char* kStateNames[kMaxStates] = {
      "square_avg", kCentered ? "grad_avg" : "momentum_buffer",
      "momentum_buffer"};
  static constexpr unsigned kNonNegative = 1;
  static constexpr bool kHasVariant = false;
  enum : int { kL2, kMinusRate, kAlpha, kSquareWeight, kEps, kKept };
  template <typename C, typename V>
  TESSERA_HOST_DEVICE static void Step(const C* c, bool, V g, V* master,
                                       V* state) {
    const V d = MultiplyAdd(c[kL2], *master, g);
    V square = MultiplyAdd(d, d * c[kSquareWeight], state[0] * c[kAlpha]);
    state[0] = square;
    if constexpr (kCentered) {
      const V mean = MultiplyAdd(c[kSquareWeight], d - state[1], state[1]);
      state[1] = mean;
      // What rounding has left below zero.
      square = Max(V::Of(0), MultiplyAdd(V::Of(0) - mean, mean, square));
    }
    V change = d / (SquareRoot(square) + c[kEps]);
    if constexpr (kMomentum) {
      V& buffer = state[kStates - 1];
      buffer = MultiplyAdd(c[kKept], buffer, change);
      change = buffer;
    }
    *master = MultiplyAdd(c[kMinusRate], change, *master);
  }
};

// Lion:
//
//   direction  sign(beta1 * exp_avg + (1 - beta1) * g)
//   exp_avg    beta2 * exp_avg + (1 - beta2) * g
//   master     master * (1 - lr * weight_decay) - lr * direction
//
// Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023;
// DeepSpeed's Lion.
struct LionFormula {
  static constexpr int kStates = 1;
  static constexpr const char* kStateNames[kMaxStates] = {"exp_avg"};
  static constexpr unsigned kNonNegative = 0;
  static constexpr bool kHasVariant = false;
  enum : int { kDecay, kMinusRate, kBeta1, kWeight1, kBeta2, kWeight2 };
  template <typename C, typename V>
  TESSERA_HOST_DEVICE static void Step(const C* c, bool, V g, V* master,
                                       V* state) {
    const V m = state[0];
    const V direction = Sign(MultiplyAdd(c[kBeta1], m, c[kWeight1] * g));
    state[0] = MultiplyAdd(c[kBeta2], m, c[kWeight2] * g);
    *master = MultiplyAdd(c[kMinusRate], direction, *master * c[kDecay]);
  }
};

// Schedule-free AdamW. Masters are y, where gradients are taken; the average of
// all z is x = lerp(y, z, 1 - 1 / beta1), which is no state. At the parameter's
// first step z is y.
//
//   exp_avg_sq  fma(g, g * (1 - beta2), exp_avg_sq * beta2)
//   d           g / (sqrt(exp_avg_sq) / sqrt(1 - beta2^step) + eps)
//               + weight_decay * y
//   y           lerp(y, z, share) - lr * (1 - beta1 * (1 - share)) * d
//   z           z - lr * d
//
// Source: Defazio et al., "The Road Less Scheduled", 2024; share is
// schedule_free.h's.
struct ScheduleFreeFormula {
  static constexpr int kStates = 2;
  static constexpr const char* kStateNames[kMaxStates] = {"z", "exp_avg_sq"};
  static constexpr unsigned kNonNegative = 0b10;
  static constexpr bool kHasVariant = true;
  enum : int {
    kL2,
    kBeta2,
    kSquareWeight,
    kCorrection,
    kEps,
    kShare,
    kMinusRateOfY,
    kMinusRate
  };
  template <typename C, typename V>
  TESSERA_HOST_DEVICE static void Step(const C* c, bool first, V g, V* master,
                                       V* state) {
    const V y = *master;
    const V z = first ? y : state[0];
    const V v = MultiplyAdd(g, g * c[kSquareWeight], state[1] * c[kBeta2]);
    state[1] = v;
    const V denominator = SquareRoot(v) / c[kCorrection] + c[kEps];
    const V d = MultiplyAdd(c[kL2], y, g / denominator);
    const V nearer = MultiplyAdd(c[kShare], z - y, y);
    *master = MultiplyAdd(c[kMinusRateOfY], d, nearer);
    state[0] = MultiplyAdd(c[kMinusRate], d, z);
  }
};

// The table: FORMULA(its number, as checkpoints call it, its type). Nobody asks
// for a loop of a program's own (optim/custom), whose states are its own.
#define TESSERA_FORMULAS(FORMULA)                                            \
  FORMULA(kAdamW, "adamw", AdamFormula<false, false>)                        \
  FORMULA(kAdamWAmsGrad, "adamw_amsgrad", AdamFormula<false, true>)          \
  FORMULA(kAdam, "adam", AdamFormula<true, false>)                           \
  FORMULA(kAdamAmsGrad, "adam_amsgrad", AdamFormula<true, true>)             \
  FORMULA(kSgd, "sgd", SgdFormula<false>)                                    \
  FORMULA(kSgdMomentum, "sgd_momentum", SgdFormula<true>)                    \
  FORMULA(kAdagrad, "adagrad", AdagradFormula)                               \
  FORMULA(kRmsProp, "rmsprop", RmsPropFormula<false, false>)                 \
  FORMULA(kRmsPropMomentum, "rmsprop_momentum", RmsPropFormula<false, true>) \
  FORMULA(kRmsPropCentered, "rmsprop_centered", RmsPropFormula<true, false>) \
  FORMULA(kRmsPropCenteredMomentum, "rmsprop_centered_momentum",             \
          RmsPropFormula<true, true>)                                        \
  FORMULA(kLion, "lion", LionFormula)                                        \
  FORMULA(kScheduleFree, "adamw_schedule_free", ScheduleFreeFormula)         \
  TESSERA_DIRECTIONS(FORMULA)                                                \
  FORMULA(kDescent, "descent", DescentFormula)                               \
  FORMULA(kCustom, "custom", DescentFormula)

enum class Formula : uint8_t {
#define TESSERA_FORMULA(number, name, ...) number,
  TESSERA_FORMULAS(TESSERA_FORMULA)
#undef TESSERA_FORMULA
};

// Calls visit(F()) with the formula's type.
template <typename Visit>
auto VisitFormula(Formula formula, const Visit& visit) {
  switch (formula) {
#define TESSERA_FORMULA(number, name, ...) \
  case Formula::number:                    \
    return visit(__VA_ARGS__());
    TESSERA_FORMULAS(TESSERA_FORMULA)
#undef TESSERA_FORMULA
  }
}

}  // namespace tessera
#endif  // OPTIM_FORMULAS_FORMULAS_H_
