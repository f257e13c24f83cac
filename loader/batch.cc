#include "loader/batch.h"

#include "ATen/ops/empty.h"

namespace tessera {

at::Tensor BatchContext::Empty(at::IntArrayRef sizes,
                               at::ScalarType dtype) const {
  return at::empty(
      sizes, at::TensorOptions(dtype).device(at::kCPU).pinned_memory(pinned_));
}

}  // namespace tessera
