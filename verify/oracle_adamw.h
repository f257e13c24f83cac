// One step of AdamW of a whole parameter as the oracle works it out: slow and
// obvious.
#ifndef VERIFY_ORACLE_ADAMW_H_
#define VERIFY_ORACLE_ADAMW_H_

#include <cstdint>

#include "ATen/core/Tensor.h"

namespace tessera {

struct OracleAdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  // torch::optim::AdamW's operators, one after the other.
  bool libtorch_exact = false;
};

// Tensors of one shape and dtype, real. `step` counts from 1.
//
// float32 on the CPU: element by element, each operation rounded to float32,
// coefficients computed in float64 and rounded once. They are those of the
// vectorised body of at::_fused_adamw_ where it is compiled with FMA:
//
//   master      *= 1 - lr * weight_decay
//   exp_avg     lerp(exp_avg, gradient, 1 - beta1), one FMA
//   exp_avg_sq  fma(gradient, gradient * (1 - beta2), exp_avg_sq * beta2)
//   master      += -(lr / (1 - beta1^step)) * exp_avg
//               / (sqrt(exp_avg_sq) / sqrt(1 - beta2^step) + eps)
//
// and every NaN is 0x7fc00000. Others: at::_fused_adamw_. With libtorch_exact,
// torch::optim::AdamW itself.
void OracleAdamW(const at::Tensor& master, const at::Tensor& exp_avg,
                 const at::Tensor& exp_avg_sq, const at::Tensor& gradient,
                 int64_t step, const OracleAdamWOptions& options);

}  // namespace tessera
#endif  // VERIFY_ORACLE_ADAMW_H_
