// For tests of AdamW: what it is compared with, the kernels on whole
// parameters, and a rank without the others.
#ifndef OPTIM_STEP_TEST_UTIL_H_
#define OPTIM_STEP_TEST_UTIL_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "optim/algorithms/coefficients.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/kernels/element_step.h"

namespace tessera {

using Tensors = std::vector<at::Tensor>;

// Copies that share storages as the originals do.
inline Tensors CopyWithStorages(const Tensors& tensors) {
  Tensors copies;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& t = tensors[i];
    at::Tensor base;
    for (size_t j = 0; j < i && !base.defined(); ++j) {
      if (tensors[j].is_alias_of(t)) base = copies[j];
    }
    if (!base.defined()) {
      base = torch::empty(
          {static_cast<int64_t>(t.storage().nbytes()) / t.element_size()},
          t.options());
    }
    copies.push_back(
        torch::empty({0}, t.options())
            .set_(base.storage(), t.storage_offset(), t.sizes(), t.strides()));
    copies.back().copy_(t.detach());
  }
  return copies;
}

// The kernels on whole parameters; optim/kernels has the tests of that of
// float32.
struct AdamWReference {
  AdamWReference(const OptimizerOptions& options, const Tensors& values)
      : options(options), params(CopyWithStorages(values)) {
    for (const at::Tensor& p : params) {
      exp_avgs.push_back(torch::zeros_like(p));
      exp_avg_sqs.push_back(torch::zeros_like(p));
    }
    steps.resize(params.size());
  }
  // Undefined gradients are skipped.
  void Step(const Tensors& gradients, double factor = 1) {
    for (size_t i = 0; i < params.size(); ++i) {
      if (!gradients[i].defined()) continue;
      if (params[i].scalar_type() == at::kFloat) {
        StepInKernel(i, gradients[i], factor);
        continue;
      }
      at::_fused_adamw_({params[i]}, {gradients[i].mul(factor)}, {exp_avgs[i]},
                        {exp_avg_sqs[i]}, {},
                        {torch::full({}, static_cast<double>(++steps[i]))},
                        options.lr, options.beta1, options.beta2,
                        options.weight_decay, options.eps, false, false);
    }
  }
  // Element by element in memory, so the gradient must lie as the parameter.
  void StepInKernel(size_t i, const at::Tensor& gradient, double factor) {
    const at::Tensor laid_out = torch::empty_like(params[i]).copy_(gradient);
    StepRange range;
    range.master = params[i].data_ptr();
    range.states[0] = exp_avgs[i].data_ptr();
    range.states[1] = exp_avg_sqs[i].data_ptr();
    range.gradient = laid_out.data_ptr();
    range.numel = params[i].numel();
    StepElements(Formula::kAdamW, range,
                 CoefficientsOf(options, ++steps[i], factor));
  }
  OptimizerOptions options;
  Tensors params, exp_avgs, exp_avg_sqs;
  std::vector<int64_t> steps;
};

}  // namespace tessera
#endif  // OPTIM_STEP_TEST_UTIL_H_
