// CountingAllocator: libtorch's CPU allocator, counted
// (base/step_memory/tensor_bytes.h).
//
//   allocate --> libtorch's, whose deleter is replaced by one of ours that
//                knows the slot; the size is malloc_usable_size's, on both
//                sides, so that nothing is stored with a block
//
// What was allocated before has libtorch's own deleter, and is not counted when
// it is freed. Where the allocator is none that takes its blocks from malloc,
// nothing is counted.
//
// raw_deallocate knows neither slot nor age: it takes the block from the
// current slot. Who uses it (oneDNN's scratch memory) frees in the operator
// that has allocated; a block that is older than the counting is taken off
// though it was never added.
//
// A refusal is noted; within a user's forward, where no call of an engine can
// say it, what is held is added to the exception's text.
//
// Threads: any.
#ifndef BASE_TORCH_COUNTING_ALLOCATOR_H_
#define BASE_TORCH_COUNTING_ALLOCATOR_H_

#include <cstddef>

#include "c10/core/Allocator.h"

namespace tessera {

class CountingAllocator final : public c10::Allocator {
 public:
  // One for the process; `base` lives to its end.
  static CountingAllocator* Over(c10::Allocator* base);

  c10::DataPtr allocate(size_t n) override;
  c10::DeleterFnPtr raw_deleter() const override;
  bool is_simple_data_ptr(const c10::DataPtr& memory) const override;
  void copy_data(void* to, const void* from, size_t n) const override;

 private:
  CountingAllocator() = default;
};

}  // namespace tessera
#endif  // BASE_TORCH_COUNTING_ALLOCATOR_H_
