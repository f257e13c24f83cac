// BlockPool keeps host memory that batches leave behind for later batches.
//
// A batch is as large as the last one; a heap that got the memory back would
// return its pages to the system, which clears new ones for the next.
//
// Threads: any. Tensors may outlive the pool.
#ifndef LOADER_BLOCK_POOL_H_
#define LOADER_BLOCK_POOL_H_

#include <cstdint>
#include <memory>

#include "ATen/core/Tensor.h"

namespace tessera {

class BlockPool {
 public:
  // Keeps at most `most` unused blocks, those that came back last.
  explicit BlockPool(int most);

  // Returns a contiguous CPU tensor of any content. Throws c10::Error.
  at::Tensor Empty(at::IntArrayRef sizes, at::ScalarType dtype);

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace tessera
#endif  // LOADER_BLOCK_POOL_H_
