#include "loader/block_pool.h"

#include <deque>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "c10/core/ScalarType.h"

namespace tessera {

struct BlockPool::Shared {
  explicit Shared(int most) : most(static_cast<size_t>(most)) {}

  // Takes the block of this size that came back last: it may still be in a
  // cache.
  at::Tensor Take(int64_t bytes) {
    {
      absl::MutexLock lock(&mutex);
      for (auto it = unused.rbegin(); it != unused.rend(); ++it) {
        if (it->numel() != bytes) continue;
        at::Tensor block = std::move(*it);
        unused.erase(std::next(it).base());
        return block;
      }
    }
    return at::empty({bytes}, at::kByte);
  }
  void Return(at::Tensor block) {
    absl::MutexLock lock(&mutex);
    unused.push_back(std::move(block));
    block = at::Tensor();
    if (unused.size() <= most) return;
    block = std::move(unused.front());  // freed outside of the lock
    unused.pop_front();
  }

  const size_t most;
  absl::Mutex mutex;
  std::deque<at::Tensor> unused ABSL_GUARDED_BY(mutex);  // bytes
};

BlockPool::BlockPool(int most) : shared_(std::make_shared<Shared>(most)) {}

at::Tensor BlockPool::Empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : sizes) bytes *= size;
  if (bytes <= 0)
    return at::empty(sizes, dtype);  // an empty tensor, or an error
  at::Tensor block = shared_->Take(bytes);
  void* const data = block.data_ptr();
  return at::from_blob(
      data, sizes,
      [shared = shared_, block = std::move(block)](void*) mutable {
        shared->Return(std::move(block));
      },
      at::TensorOptions(dtype));
}

}  // namespace tessera
