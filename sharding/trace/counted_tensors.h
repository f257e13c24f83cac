// CountedTensors: what libtorch's CPU allocator holds, as it was asked for: the
// truth that a trace is compared with. For tests; from its first use on an
// allocator of ours stands before libtorch's. Use it before anything installs
// base/torch/tensor_memory.h, whose memory it would count, too.
//
// Threads: any.
#ifndef SHARDING_TRACE_COUNTED_TENSORS_H_
#define SHARDING_TRACE_COUNTED_TENSORS_H_

#include <cstdint>

namespace tessera {

class CountedTensors {
 public:
  static CountedTensors& Global();

  int64_t held_bytes() const;
  int64_t peak_bytes() const;
  // What is held now may be the peak: what is counted besides has changed.
  void Sample();
  // The peak is what is held now.
  void ResetPeak();
  // From now on the peak is of the sum with what this says, which is asked
  // whenever tensors come or go, and by Sample.
  void CountBesides(int64_t (*bytes)());
};

}  // namespace tessera
#endif  // SHARDING_TRACE_COUNTED_TENSORS_H_
