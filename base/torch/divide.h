// Divides each element with one rounding and the same bits on all devices.
// libtorch's division by a number multiplies by its reciprocal on a GPU.
#ifndef BASE_TORCH_DIVIDE_H_
#define BASE_TORCH_DIVIDE_H_

#include "ATen/core/Tensor.h"

namespace tessera {

// Divides in place; a divisor of 1 does nothing. Throws c10::Error. ASYNC on
// devices: on the current stream.
void DivideBy(const at::Tensor& t, double divisor);

}  // namespace tessera
#endif  // BASE_TORCH_DIVIDE_H_
