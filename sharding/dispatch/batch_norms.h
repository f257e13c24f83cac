// Replaces aten::batch_norm in training for given weights, while an engine owns
// them (nn/sync_batch_norm.h: statistics of all ranks). In C++ neither a module
// nor its forward can be exchanged from outside; the operator can.
//
// Threads: any.
#ifndef SHARDING_DISPATCH_BATCH_NORMS_H_
#define SHARDING_DISPATCH_BATCH_NORMS_H_

#include <functional>

#include "ATen/core/Tensor.h"
#include "ATen/core/stack.h"

namespace tessera {

struct BatchNormCall {
  at::Tensor input, weight;
  at::Tensor bias, running_mean, running_var;  // undefined: none
  double momentum = 0, eps = 0;
};
using BatchNormReplacement = std::function<at::Tensor(const BatchNormCall&)>;

// Replaces calls with this weight from now on; null: ends that. The weight is
// not kept alive.
void ReplaceBatchNorm(const at::Tensor& weight,
                      BatchNormReplacement replacement);

// Runs the replacement of the call of aten::batch_norm on top of the stack, for
// the fallback; returns false if there is none, else its result is on the
// stack.
bool RunBatchNormReplacement(torch::jit::Stack* stack);

}  // namespace tessera
#endif  // SHARDING_DISPATCH_BATCH_NORMS_H_
