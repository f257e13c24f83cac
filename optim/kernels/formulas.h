// What each elementwise optimizer does to one element, written once: for the
// vectors of three instruction sets (step_loops.cc), for float64, and for GPUs.
//
// V is a float, or several: with + - * /, each rounded once, never fused;
// SquareRoot, MultiplyAdd(a, b, c) = a * b + c rounded once, Max and Sign (NaN
// of NaN), V::Of(x). C is one of them, or one that stands for all. `g` is the
// gradient times its factor. Coefficients are computed in float64
// (coefficients.cc) and rounded to V once.
//
// A formula's states are zeros before the first step; bit s of kNonNegative
// says that state s is never less, kHasVariant that `variant` is looked at. Of
// two NaNs an addition might return either, which is for the compiler to
// choose: who stores what a formula has changed makes every NaN one.
#ifndef OPTIM_KERNELS_FORMULAS_H_
#define OPTIM_KERNELS_FORMULAS_H_

#include "optim/kernels/element_step.h"

#ifdef __CUDACC__
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif

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
  static constexpr unsigned kNonNegative = 0;
  static constexpr bool kHasVariant = false;
  enum : int { kDecay, kMinusRate };
  template <typename C, typename V>
  TESSERA_HOST_DEVICE static void Step(const C* c, bool, V g, V* master, V*) {
    *master = MultiplyAdd(c[kMinusRate], g, *master * c[kDecay]);
  }
};

template <typename F>
TESSERA_HOST_DEVICE constexpr bool IsNonNegative(int state) {
  return (F::kNonNegative >> state & 1) != 0;
}

// Calls visit(F()) with the formula's type.
template <typename Visit>
auto VisitFormula(Formula formula, const Visit& visit) {
  switch (formula) {
    case Formula::kAdamW:
      return visit(AdamFormula<false, false>());
    case Formula::kAdamWAmsGrad:
      return visit(AdamFormula<false, true>());
    case Formula::kAdam:
      return visit(AdamFormula<true, false>());
    case Formula::kAdamAmsGrad:
      return visit(AdamFormula<true, true>());
    case Formula::kSgd:
      return visit(SgdFormula<false>());
    case Formula::kSgdMomentum:
      return visit(SgdFormula<true>());
    case Formula::kAdagrad:
      return visit(AdagradFormula());
    case Formula::kRmsProp:
      return visit(RmsPropFormula<false, false>());
    case Formula::kRmsPropMomentum:
      return visit(RmsPropFormula<false, true>());
    case Formula::kRmsPropCentered:
      return visit(RmsPropFormula<true, false>());
    case Formula::kRmsPropCenteredMomentum:
      return visit(RmsPropFormula<true, true>());
    case Formula::kLion:
      return visit(LionFormula());
    case Formula::kScheduleFree:
      return visit(ScheduleFreeFormula());
    case Formula::kLambDirection:
      return visit(LambFormula());
    case Formula::kMuonDirection:
      return visit(MuonFormula());
    // Of neither Adafactor nor a program's own is a loop asked for; they have
    // no states of this kind.
    case Formula::kAdafactorDirection:
    case Formula::kDescent:
    case Formula::kCustom:
      return visit(DescentFormula());
  }
}

}  // namespace tessera
#endif  // OPTIM_KERNELS_FORMULAS_H_
