// TensorMemory is memory of CPU tensors that is not libtorch's.
//
//   at::empty, on a thread with a TensorMemoryScope --> TensorMemorySource
//                                   --> its own memory, or libtorch's
//
// Operators run as they are; only where their results lie changes.
//
// From the first scope or CountTensorMemory on, for good, an allocator of ours
// stands before libtorch's, which it counts (base/torch/counting_allocator.h).
// What either gave may be freed at any time, also by raw_deallocate (oneDNN's
// scratch memory), which knows nothing but the address; so one table holds the
// addresses.
//
// Threads: any. A scope belongs to its thread.
#ifndef BASE_TORCH_TENSOR_MEMORY_H_
#define BASE_TORCH_TENSOR_MEMORY_H_

#include <cstdint>
#include <memory>

#include "c10/core/Allocator.h"

namespace tessera {

// The memory of one storage. It is destroyed when the storage is, or when the
// storage takes other memory.
class TensorMemory {
 public:
  virtual ~TensorMemory() = default;
};

// Hands over `memory`, which lies at `data`.
c10::DataPtr DataPtrOf(void* data, std::unique_ptr<TensorMemory> memory);
// Returns what was handed over as `data`; null if that is another's.
TensorMemory* TensorMemoryOf(const c10::DataPtr& data);

class TensorMemorySource {
 public:
  virtual ~TensorMemorySource() = default;
  // Allocates `bytes` > 0 for a CPU tensor, by DataPtrOf or from `base`. May
  // throw.
  virtual c10::DataPtr Allocate(int64_t bytes, c10::Allocator& base) = 0;
};

// Counts libtorch's memory from now on.
void CountTensorMemory();

// For its life this thread's CPU tensors come from `source`, not from that of
// an enclosing scope.
class TensorMemoryScope {
 public:
  explicit TensorMemoryScope(TensorMemorySource* source);
  ~TensorMemoryScope();
  TensorMemoryScope(const TensorMemoryScope&) = delete;
  TensorMemoryScope& operator=(const TensorMemoryScope&) = delete;

 private:
  TensorMemorySource* const before_;
};

}  // namespace tessera
#endif  // BASE_TORCH_TENSOR_MEMORY_H_
