#include "loader/batch.h"

#include "ATen/ops/empty.h"
#include "loader/block_pool.h"

namespace tessera {

at::Tensor BatchContext::Empty(at::IntArrayRef sizes,
                               at::ScalarType dtype) const {
  if (pool_ != nullptr) return pool_->Empty(sizes, dtype);
  return at::empty(
      sizes, at::TensorOptions(dtype).device(at::kCPU).pinned_memory(true));
}

}  // namespace tessera
