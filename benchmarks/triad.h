// STREAM's triad, a[i] = b[i] + s * c[i], shows what the memory gives a plain
// loop.
#ifndef BENCHMARKS_TRIAD_H_
#define BENCHMARKS_TRIAD_H_

#include <cstdint>

namespace tessera {

// An element takes three transfers of the program, 12 bytes; four, 16 bytes,
// with the lines of `a` that the processor reads before it writes them.
inline void Triad(float* a, const float* b, const float* c, float s,
                  int64_t numel) {
#pragma clang loop vectorize(assume_safety)
  for (int64_t i = 0; i < numel; ++i) a[i] = b[i] + s * c[i];
}

}  // namespace tessera
#endif  // BENCHMARKS_TRIAD_H_
