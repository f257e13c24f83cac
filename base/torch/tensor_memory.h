// TensorMemory: memory of CPU tensors that is not libtorch's.
//
//   at::empty, on a thread with a TensorMemoryScope --> TensorMemorySource
//                                   --> its own memory, or libtorch's
//
// Operators run as they are; only where their results lie is another's matter.
//
// From the first scope, or CountTensorMemory, on an allocator of ours stands
// before libtorch's, which it counts (base/torch/counting_allocator.h), for
// good: what either gave may be freed at any time, also by raw_deallocate
// (oneDNN's scratch memory), which knows nothing but the address. So there is
// one table of addresses.
//
// Threads: any. A scope is its thread's.
#ifndef BASE_TORCH_TENSOR_MEMORY_H_
#define BASE_TORCH_TENSOR_MEMORY_H_

#include <cstdint>
#include <memory>

#include "c10/core/Allocator.h"

namespace tessera {

// The memory of one storage, destroyed when the storage is, or when it takes
// other memory.
class TensorMemory {
 public:
  virtual ~TensorMemory() = default;
};

// Hands over `memory`, which lies at `data`.
c10::DataPtr DataPtrOf(void* data, std::unique_ptr<TensorMemory> memory);
// What was handed over so; null: that is another's.
TensorMemory* TensorMemoryOf(const c10::DataPtr& data);

class TensorMemorySource {
 public:
  virtual ~TensorMemorySource() = default;
  // `bytes` > 0 for a CPU tensor: from DataPtrOf, or of `base`. May throw.
  virtual c10::DataPtr Allocate(int64_t bytes, c10::Allocator& base) = 0;
};

// libtorch's memory is counted from now on.
void CountTensorMemory();

// For its life this thread's CPU tensors come from `source`, and not from that
// of a scope around it.
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
