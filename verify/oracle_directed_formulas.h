// Formulas by element of optimizers whose step of an element depends on its
// whole parameter; oracle_formulas.h has the others.
//
//   Lamb, of a parameter as a whole
//     exp_avg, exp_avg_sq  as Adam's, of d = g
//     u           fma(weight_decay, master, exp_avg / (1 - beta1^step)
//                 / (sqrt(exp_avg_sq) / sqrt(1 - beta2^step) + eps))
//     master      fma(-(lr * ratio), u, master), ratio the norm of the masters
//                 over that of u, within min_coeff and max_coeff; 1 where one
//                 is 0
//   Muon, of a matrix
//     buffer      fma(1 - momentum, g - buffer, buffer)
//     c           with nesterov fma(momentum, buffer - g, g), else buffer
//     master      fma(-(lr * scale), orthogonal(c),
//                 master * (1 - lr * weight_decay))
#ifndef VERIFY_ORACLE_DIRECTED_FORMULAS_H_
#define VERIFY_ORACLE_DIRECTED_FORMULAS_H_

#include <cmath>

#include "verify/oracle_formulas.h"
#include "verify/oracle_step.h"

namespace tessera::oracle {

// In place of the master: Lamb's u.
template <typename T>
class Lamb {
 public:
  Lamb(const OracleStepOptions& o, double step)
      : decay_(Rounded<T>(o.weight_decay)),
        weight_(Rounded<T>(1 - o.beta1)),
        beta2_(Rounded<T>(o.beta2)),
        square_weight_(Rounded<T>(1 - o.beta2)),
        eps_(Rounded<T>(o.eps)) {
    double correction1 = 1, correction2 = 1;
    if (o.bias_correction) {
      correction1 -= std::pow(o.beta1, step);
      correction2 -= std::pow(o.beta2, step);
    }
    correction1_ = Rounded<T>(correction1);
    correction2_ = Rounded<T>(std::sqrt(correction2));
  }

  void Step(T g, T* master, T* state) const {
    state[0] = OneNan(Lerp(state[0], g, weight_));
    const T decayed = state[1] * beta2_;
    const T weighted = g * square_weight_;
    state[1] = OneNan(std::fma(g, weighted, decayed));
    T denominator = std::sqrt(state[1]);
    denominator /= correction2_;
    denominator += eps_;
    T u = state[0] / correction1_;
    u /= denominator;
    *master = OneNan(std::fma(decay_, *master, u));
  }

 private:
  T decay_, weight_, beta2_, square_weight_, eps_, correction1_, correction2_;
};

// In place of the master: Muon's c.
template <typename T>
class Muon {
 public:
  Muon(const OracleStepOptions& o, double)
      : weight_(Rounded<T>(1 - o.momentum)),
        momentum_(Rounded<T>(o.momentum)),
        nesterov_(o.nesterov) {}

  void Step(T g, T* master, T* state) const {
    const T way = g - state[0];
    state[0] = OneNan(std::fma(weight_, way, state[0]));
    *master = state[0];
    if (!nesterov_) return;
    const T back = state[0] - g;
    *master = OneNan(std::fma(momentum_, back, g));
  }

 private:
  T weight_, momentum_;
  bool nesterov_;
};

}  // namespace tessera::oracle
#endif  // VERIFY_ORACLE_DIRECTED_FORMULAS_H_
