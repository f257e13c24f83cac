// Division of each element, rounded once, with the same bits on all devices: a
// GPU that is given a number multiplies with its reciprocal.
#ifndef BASE_TORCH_DIVIDE_H_
#define BASE_TORCH_DIVIDE_H_

#include "ATen/core/Tensor.h"

namespace tessera {

// In place; nothing for 1. Throws c10::Error. ASYNC on devices: on the current
// stream.
void DivideBy(const at::Tensor& t, double divisor);
// The same in a tensor of its own; `t` itself for 1.
at::Tensor Divided(const at::Tensor& t, double divisor);

}  // namespace tessera
#endif  // BASE_TORCH_DIVIDE_H_
