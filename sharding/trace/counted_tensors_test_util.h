// CountedTensors: counts the bytes that were requested from libtorch's CPU
// allocator, to check traces in tests. From its first use on, an allocator of
// ours wraps libtorch's. Use it before anything installs
// base/torch/tensor_memory.h, whose memory it would count, too.
//
// Threads: any.
#ifndef SHARDING_TRACE_COUNTED_TENSORS_TEST_UTIL_H_
#define SHARDING_TRACE_COUNTED_TENSORS_TEST_UTIL_H_

#include <cstdint>

namespace tessera {

class CountedTensors {
 public:
  static CountedTensors& Global();

  int64_t held_bytes() const;
  int64_t peak_bytes() const;
  // Updates the peak: what is counted besides has changed.
  void Sample();
  // Sets the peak to what is held now.
  void ResetPeak();
  // Makes the peak that of the sum with `bytes`, which is called whenever
  // tensors come or go, and by Sample.
  void CountBesides(int64_t (*bytes)());
};

}  // namespace tessera
#endif  // SHARDING_TRACE_COUNTED_TENSORS_TEST_UTIL_H_
