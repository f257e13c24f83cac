// Calls libtorch's own fused AdamW, for tests that compare the engine or the
// oracle with plain training.
#ifndef TESTS_SUPPORT_LIBTORCH_ADAMW_H_
#define TESTS_SUPPORT_LIBTORCH_ADAMW_H_

#include <ATen/Version.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>

#include "verify/oracle_step.h"

namespace tessera {

// Takes the arguments of OracleStep. A float32 parameter on the CPU is padded
// with zeros until all elements go through the kernel's vectorised body, in one
// thread: the scalar code for the rest rounds differently, and training here
// has the bits of the body (optim/formulas/formulas.h). Where libtorch finds no
// FMA it rounds differently everywhere; there this is OracleStep.
inline void LibtorchAdamW(const at::Tensor& param, const at::Tensor& exp_avg,
                          const at::Tensor& exp_avg_sq,
                          const at::Tensor& gradient, int64_t step,
                          const OracleStepOptions& o) {
  constexpr int64_t kVector = 64;  // elements, or a divisor of it
  torch::NoGradGuard no_grad;
  const std::string capability = at::get_cpu_capability();
  const bool body = param.is_cpu() && param.scalar_type() == at::kFloat;
  if (body && capability != "AVX2" && capability != "AVX512") {
    return OracleStep(param, {exp_avg, exp_avg_sq}, gradient, step, o);
  }
  const int64_t numel = param.numel();
  const int64_t pad = body ? (kVector - numel % kVector) % kVector : 0;
  const auto padded = [&](const at::Tensor& t) {
    return at::constant_pad_nd(t.reshape({-1}), {0, pad}).clone();
  };
  const at::Tensor p = padded(param), m = padded(exp_avg),
                   v = padded(exp_avg_sq);
  const int threads = at::get_num_threads();
  if (body) at::set_num_threads(1);
  at::_fused_adamw_({p}, {padded(gradient)}, {m}, {v}, /*max_exp_avg_sqs=*/{},
                    {torch::full({}, static_cast<double>(step),
                                 at::TensorOptions(param.device()))},
                    o.lr, o.beta1, o.beta2, o.weight_decay, o.eps,
                    /*amsgrad=*/false, /*maximize=*/false);
  if (body) at::set_num_threads(threads);
  // Autograd does not see the write, as with the kernel itself.
  param.data().copy_(p.narrow(0, 0, numel).view(param.sizes()));
  exp_avg.copy_(m.narrow(0, 0, numel).view(param.sizes()));
  exp_avg_sq.copy_(v.narrow(0, 0, numel).view(param.sizes()));
}

}  // namespace tessera
#endif  // TESTS_SUPPORT_LIBTORCH_ADAMW_H_
