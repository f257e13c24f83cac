// Makes tensors over memory that they do not own and that must outlive them.
// They share the memory alone, neither a version counter nor dispatch keys, so
// autograd and tagged storage see nothing of what is written through them.
#ifndef BASE_TORCH_TENSOR_OVER_H_
#define BASE_TORCH_TENSOR_OVER_H_

#include <cstdint>

#include "ATen/core/Tensor.h"

namespace tessera {

// Accepts any layout, on any device.
at::Tensor TensorOver(char* data, at::IntArrayRef sizes,
                      at::IntArrayRef strides, at::ScalarType dtype,
                      at::Device device);

// Returns elements [begin, begin + numel) of contiguous `t`.
at::Tensor ElementsOver(const at::Tensor& t, int64_t begin, int64_t numel);

// Returns bytes of the host's memory as a tensor.
at::Tensor BytesOver(void* data, int64_t bytes);

}  // namespace tessera
#endif  // BASE_TORCH_TENSOR_OVER_H_
