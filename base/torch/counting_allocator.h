// CountingAllocator is libtorch's CPU allocator with its bytes counted
// (base/step_memory/tensor_bytes.h).
//
//   allocate --> libtorch's, whose deleter is replaced by one of ours that
//                knows the slot; the size is malloc_usable_size's, on both
//                sides, so that nothing is stored with a block
//
// Memory that was allocated before has libtorch's own deleter and is not
// counted when it is freed. Where the allocator does not take its blocks from
// malloc, nothing is counted.
//
// raw_deallocate knows neither slot nor age, so it takes the block from the
// current slot. Its user (oneDNN's scratch memory) frees in the operator that
// has allocated. A block that is older than the counting is subtracted though
// it was never added.
//
// A refusal is noted. Within a user's forward, where no call of an engine can
// report it, what is held is added to the exception's text.
//
// Threads: any.
#ifndef BASE_TORCH_COUNTING_ALLOCATOR_H_
#define BASE_TORCH_COUNTING_ALLOCATOR_H_

#include <cstddef>

#include "c10/core/Allocator.h"

namespace tessera {

class CountingAllocator final : public c10::Allocator {
 public:
  // Returns the one of the process; `base` lives to its end.
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
