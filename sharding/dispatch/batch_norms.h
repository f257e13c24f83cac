// What runs in the place of aten::batch_norm in training where its weight is
// one of these, as long as an engine has it (nn/sync_batch_norm.h: the
// statistics of all ranks). Modules in C++ cannot be exchanged in what holds
// them, nor their forward; the operator can.
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

// From now on; null: no longer. The weight is not kept alive.
void ReplaceBatchNorm(const at::Tensor& weight,
                      BatchNormReplacement replacement);

// For the fallback: true if the call of aten::batch_norm on top of the stack
// was replaced, and its result is there.
bool RunBatchNormReplacement(torch::jit::Stack* stack);

}  // namespace tessera
#endif  // SHARDING_DISPATCH_BATCH_NORMS_H_
