// What each optimizer does to one element, as the oracle works it out: one
// operation to a line, of which none may be fused with another (the build says
// so). T is float or double; `state` are those of the element, in the order of
// the names below.
//
// Each operation is rounded to the type of the masters, none is fused with
// another, but fma(a, b, c) = a * b + c, rounded once. Coefficients ("lr /
// (1 - beta1^step)") are computed in float64 and rounded once. g is the
// gradient, with maximize -gradient. States are zeros before the first step.
//
//   SGD, Adagrad, RMSprop, Adam: d = fma(weight_decay, master, g); AdamW: d = g
//
//   AdamW, Adam
//     exp_avg     w = 1 - beta1: fma(w, d - exp_avg, exp_avg) if w is below
//                 0.5, else fma(w - 1, d - exp_avg, d)
//     exp_avg_sq  fma(d, d * (1 - beta2), exp_avg_sq * beta2)
//     max         with amsgrad, of exp_avg_sq, which it stands for below
//     master      master * (1 - lr * weight_decay), of AdamW,
//                 + -(lr / (1 - beta1^step)) * exp_avg
//                 / (sqrt(exp_avg_sq) / sqrt(1 - beta2^step) + eps)
//                 without bias correction 1 for 1 - beta^step
//   SGD
//     buffer      with momentum: fma(momentum, buffer, (1 - dampening) * d); at
//                 the first step fma(0, buffer, d), so that -0 becomes 0
//     c           d; with momentum buffer, with nesterov fma(momentum, buffer,
//                 d)
//     master      fma(-lr, c, master)
//   Adagrad
//     sum         fma(d, d, sum)
//     master      + -(lr / (1 + (step - 1) * lr_decay)) * d
//                 / (sqrt(initial_accumulator_value + sum) + eps)
//   RMSprop
//     square_avg  fma(d, d * (1 - alpha), square_avg * alpha)
//     grad_avg    centered: fma(1 - alpha, d - grad_avg, grad_avg), and below
//                 max(0, fma(-grad_avg, grad_avg, square_avg)) for square_avg
//     c           d / (sqrt(square_avg) + eps)
//     buffer      with momentum: fma(momentum, buffer, c), which c is below
//     master      fma(-lr, c, master)
//   Schedule-free AdamW; the master is y
//     z           at the first step y
//     exp_avg_sq  as Adam's, of d = g
//     d           fma(weight_decay, y,
//                 g / (sqrt(exp_avg_sq) / sqrt(1 - beta2^step) + eps))
//     y           fma(-(lr * (1 - beta1 * (1 - share))), d,
//                 fma(share, z - y, y))
//     z           fma(-lr, d, z)
//   Lion
//     c           sign(fma(beta1, exp_avg, (1 - beta1) * g)), of zeros +0
//     exp_avg     fma(beta2, exp_avg, (1 - beta2) * g)
//     master      fma(-lr, c, master * (1 - lr * weight_decay))
//
// Every NaN of a state or a master is 0x7fc00000.
#ifndef VERIFY_ORACLE_FORMULAS_H_
#define VERIFY_ORACLE_FORMULAS_H_

#include <cmath>
#include <limits>
#include <string>

#include "verify/oracle_step.h"

namespace tessera::oracle {

template <typename T>
T Rounded(double x) {
  return static_cast<T>(x);
}

template <typename T>
T OneNan(T x) {
  return std::isnan(x) ? std::numeric_limits<T>::quiet_NaN() : x;
}

// NaN if one is.
template <typename T>
T Larger(T a, T b) {
  if (std::isnan(a) || std::isnan(b)) return OneNan(a + b);
  return a > b ? a : b;
}

// start + weight * (end - start), from the nearer of the two.
template <typename T>
T Lerp(T start, T end, T weight) {
  const T way = end - start;
  if (weight < T{0.5}) return std::fma(weight, way, start);
  const T back = weight - 1;
  return std::fma(back, way, end);
}

template <typename T>
class Adam {
 public:
  static int States(const OracleStepOptions& o) { return o.amsgrad ? 3 : 2; }
  Adam(const OracleStepOptions& o, double step)
      : l2_(o.algorithm == "Adam"),
        amsgrad_(o.amsgrad),
        decay_(Rounded<T>(o.weight_decay)),
        kept_(Rounded<T>(1 - o.lr * o.weight_decay)),
        weight_(Rounded<T>(1 - o.beta1)),
        beta2_(Rounded<T>(o.beta2)),
        square_weight_(Rounded<T>(1 - o.beta2)),
        eps_(Rounded<T>(o.eps)) {
    double correction1 = 1, correction2 = 1;
    if (o.bias_correction) {
      correction1 -= std::pow(o.beta1, step);
      correction2 -= std::pow(o.beta2, step);
    }
    minus_step_size_ = Rounded<T>(-(o.lr / correction1));
    correction_ = Rounded<T>(std::sqrt(correction2));
  }

  void Step(T g, T* master, T* state) const {
    T kept = *master;
    if (l2_) {
      g = std::fma(decay_, *master, g);
    } else {
      kept *= kept_;
    }
    state[0] = OneNan(Lerp(state[0], g, weight_));
    const T decayed = state[1] * beta2_;
    const T weighted = g * square_weight_;
    state[1] = OneNan(std::fma(g, weighted, decayed));
    T square = state[1];
    if (amsgrad_) square = state[2] = Larger(state[2], square);
    T denominator = std::sqrt(square);
    denominator /= correction_;
    denominator += eps_;
    T change = minus_step_size_ * state[0];
    change /= denominator;
    *master = OneNan(kept + change);
  }

 private:
  const bool l2_, amsgrad_;
  const T decay_, kept_, weight_, beta2_, square_weight_, eps_;
  T minus_step_size_, correction_;
};

template <typename T>
class Sgd {
 public:
  static int States(const OracleStepOptions& o) {
    return o.momentum != 0 ? 1 : 0;
  }
  Sgd(const OracleStepOptions& o, double step)
      : has_buffer_(o.momentum != 0),
        nesterov_(o.nesterov),
        decay_(Rounded<T>(o.weight_decay)),
        minus_lr_(Rounded<T>(-o.lr)),
        momentum_(Rounded<T>(o.momentum)),
        kept_(step == 1 ? 0 : momentum_),
        added_(step == 1 ? 1 : Rounded<T>(1 - o.dampening)) {}

  void Step(T g, T* master, T* state) const {
    const T d = std::fma(decay_, *master, g);
    T change = d;
    if (has_buffer_) {
      const T added = added_ * d;
      state[0] = OneNan(std::fma(kept_, state[0], added));
      change = state[0];
      if (nesterov_) change = std::fma(momentum_, state[0], d);
    }
    *master = OneNan(std::fma(minus_lr_, change, *master));
  }

 private:
  const bool has_buffer_, nesterov_;
  const T decay_, minus_lr_, momentum_, kept_, added_;
};

template <typename T>
class Adagrad {
 public:
  static int States(const OracleStepOptions&) { return 1; }
  Adagrad(const OracleStepOptions& o, double step)
      : decay_(Rounded<T>(o.weight_decay)),
        minus_lr_(Rounded<T>(-(o.lr / (1 + (step - 1) * o.lr_decay)))),
        initial_(Rounded<T>(o.initial_accumulator_value)),
        eps_(Rounded<T>(o.eps)) {}

  void Step(T g, T* master, T* state) const {
    const T d = std::fma(decay_, *master, g);
    state[0] = OneNan(std::fma(d, d, state[0]));
    T denominator = initial_ + state[0];
    denominator = std::sqrt(denominator);
    denominator += eps_;
    T change = minus_lr_ * d;
    change /= denominator;
    *master = OneNan(*master + change);
  }

 private:
  const T decay_, minus_lr_, initial_, eps_;
};

template <typename T>
class RmsProp {
 public:
  static int States(const OracleStepOptions& o) {
    return 1 + (o.centered ? 1 : 0) + (o.momentum != 0 ? 1 : 0);
  }
  RmsProp(const OracleStepOptions& o, double)
      : centered_(o.centered),
        has_buffer_(o.momentum != 0),
        decay_(Rounded<T>(o.weight_decay)),
        minus_lr_(Rounded<T>(-o.lr)),
        alpha_(Rounded<T>(o.alpha)),
        square_weight_(Rounded<T>(1 - o.alpha)),
        eps_(Rounded<T>(o.eps)),
        momentum_(Rounded<T>(o.momentum)) {}

  void Step(T g, T* master, T* state) const {
    const T d = std::fma(decay_, *master, g);
    const T decayed = state[0] * alpha_;
    const T weighted = d * square_weight_;
    state[0] = OneNan(std::fma(d, weighted, decayed));
    T square = state[0];
    if (centered_) {
      const T way = d - state[1];
      state[1] = OneNan(std::fma(square_weight_, way, state[1]));
      const T mean = state[1];
      square = Larger(T{0}, std::fma(-mean, mean, square));
    }
    T denominator = std::sqrt(square);
    denominator += eps_;
    T change = d / denominator;
    if (has_buffer_) {
      T& buffer = state[centered_ ? 2 : 1];
      buffer = OneNan(std::fma(momentum_, buffer, change));
      change = buffer;
    }
    *master = OneNan(std::fma(minus_lr_, change, *master));
  }

 private:
  const bool centered_, has_buffer_;
  const T decay_, minus_lr_, alpha_, square_weight_, eps_, momentum_;
};

template <typename T>
class ScheduleFree {
 public:
  static int States(const OracleStepOptions&) { return 2; }
  ScheduleFree(const OracleStepOptions& o, double step)
      : begins_(step == 1),
        decay_(Rounded<T>(o.weight_decay)),
        beta2_(Rounded<T>(o.beta2)),
        square_weight_(Rounded<T>(1 - o.beta2)),
        eps_(Rounded<T>(o.eps)),
        share_(Rounded<T>(o.average_share)),
        minus_lr_(Rounded<T>(-o.lr)) {
    const double unbiased = 1 - std::pow(o.beta2, step);
    correction_ = Rounded<T>(std::sqrt(unbiased));
    // How far x goes of z's step, and of that y.
    const double of_x = o.beta1 * (1 - o.average_share);
    minus_lr_of_y_ = Rounded<T>(-(o.lr * (1 - of_x)));
  }

  void Step(T g, T* master, T* state) const {
    if (begins_) state[0] = *master;
    const T decayed = state[1] * beta2_;
    const T weighted = g * square_weight_;
    state[1] = OneNan(std::fma(g, weighted, decayed));
    T denominator = std::sqrt(state[1]);
    denominator /= correction_;
    denominator += eps_;
    T d = g / denominator;
    d = std::fma(decay_, *master, d);
    const T way = state[0] - *master;
    const T nearer = std::fma(share_, way, *master);
    *master = OneNan(std::fma(minus_lr_of_y_, d, nearer));
    state[0] = OneNan(std::fma(minus_lr_, d, state[0]));
  }

 private:
  const bool begins_;
  const T decay_, beta2_, square_weight_, eps_, share_, minus_lr_;
  T correction_, minus_lr_of_y_;
};

template <typename T>
class Lion {
 public:
  static int States(const OracleStepOptions&) { return 1; }
  Lion(const OracleStepOptions& o, double)
      : kept_(Rounded<T>(1 - o.lr * o.weight_decay)),
        minus_lr_(Rounded<T>(-o.lr)),
        beta1_(Rounded<T>(o.beta1)),
        weight1_(Rounded<T>(1 - o.beta1)),
        beta2_(Rounded<T>(o.beta2)),
        weight2_(Rounded<T>(1 - o.beta2)) {}

  void Step(T g, T* master, T* state) const {
    const T added1 = weight1_ * g;
    const T mixed = std::fma(beta1_, state[0], added1);
    T direction = mixed > 0 ? 1 : 0;
    if (mixed < 0) direction = -1;
    if (std::isnan(mixed)) direction = OneNan(mixed);
    const T added2 = weight2_ * g;
    state[0] = OneNan(std::fma(beta2_, state[0], added2));
    const T kept = *master * kept_;
    *master = OneNan(std::fma(minus_lr_, direction, kept));
  }

 private:
  const T kept_, minus_lr_, beta1_, weight1_, beta2_, weight2_;
};

template <template <typename> class F>
struct Of {
  template <typename T>
  using Formula = F<T>;
};

// Calls visit(Of<Formula>()) with the formula of OracleStepOptions::algorithm.
// False: it is none of these.
template <typename Visit>
bool VisitFormula(const std::string& algorithm, const Visit& visit) {
  if (algorithm == "Adam" || algorithm == "AdamW") {
    visit(Of<Adam>());
  } else if (algorithm == "SGD") {
    visit(Of<Sgd>());
  } else if (algorithm == "Adagrad") {
    visit(Of<Adagrad>());
  } else if (algorithm == "RMSprop") {
    visit(Of<RmsProp>());
  } else if (algorithm == "Lion") {
    visit(Of<Lion>());
  } else if (algorithm == "AdamWScheduleFree") {
    visit(Of<ScheduleFree>());
  } else {
    return false;
  }
  return true;
}

}  // namespace tessera::oracle
#endif  // VERIFY_ORACLE_FORMULAS_H_
