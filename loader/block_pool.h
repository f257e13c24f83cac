// BlockPool: memory of the host that batches leave behind, for those to come.
//
// A batch is as large as the last, and a heap that gets it back returns its
// pages to the system, which makes new ones, filled with zeros, for the next.
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
  // Keeps at most `most` blocks that nobody uses: those that came back last.
  explicit BlockPool(int most);

  // Of the CPU, contiguous, of any content. Throws c10::Error.
  at::Tensor Empty(at::IntArrayRef sizes, at::ScalarType dtype);

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace tessera
#endif  // LOADER_BLOCK_POOL_H_
