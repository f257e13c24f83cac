// Sums of slices in rank order: slice 0 + slice 1 + ..., element by element, so
// that the bits do not depend on where, or in which pieces, the sum is taken.
// Elements of 16 bits are summed in float and rounded once; what is divided is
// the rounded sum, and rounded again.
//
//   slices [ slice 0 .. | slice 1 .. | ... ]   num_slices * numel elements
//   out    [ sum ..     ]                      numel elements
//
// SumInOrder is the whole logic; the kernel and its CPU twin both call it.
#ifndef COMM_REDUCE_ORDERED_SUM_H_
#define COMM_REDUCE_ORDERED_SUM_H_

#include <cstdint>

#include "c10/util/BFloat16.h"
#include "c10/util/Half.h"

#ifdef __CUDACC__
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif

namespace tessera {

// What elements are summed and divided in.
template <typename T>
struct SumType {
  using type = T;
};
template <>
struct SumType<c10::BFloat16> {
  using type = float;
};
template <>
struct SumType<c10::Half> {
  using type = float;
};

// Element i of the sum, over `divisor`. Starts with slice 0, not with zero:
// -0.0 stays -0.0.
template <typename T>
TESSERA_HOST_DEVICE inline T SumInOrder(const T* slices, int num_slices,
                                        int64_t numel, double divisor,
                                        int64_t i) {
  using Sum = typename SumType<T>::type;
  Sum sum = static_cast<Sum>(slices[i]);
  for (int s = 1; s < num_slices; ++s) {
    sum = sum + static_cast<Sum>(slices[s * numel + i]);
  }
  const T rounded = static_cast<T>(sum);
  if (divisor == 1) return rounded;
  return static_cast<T>(static_cast<Sum>(rounded) / static_cast<Sum>(divisor));
}

template <typename T>
void OrderedSumCpu(const T* slices, int num_slices, int64_t numel,
                   double divisor, T* out) {
  for (int64_t i = 0; i < numel; ++i) {
    out[i] = SumInOrder(slices, num_slices, numel, divisor, i);
  }
}

// On the GPU that is current. `stream` is a cudaStream_t. ASYNC: on `stream`.
// The return value is a cudaError_t, 0 if the launch went well. `out` may be
// any of the slices.
int OrderedSumCuda(const float* slices, int num_slices, int64_t numel,
                   double divisor, float* out, void* stream);
int OrderedSumCuda(const double* slices, int num_slices, int64_t numel,
                   double divisor, double* out, void* stream);
int OrderedSumCuda(const c10::BFloat16* slices, int num_slices, int64_t numel,
                   double divisor, c10::BFloat16* out, void* stream);
int OrderedSumCuda(const c10::Half* slices, int num_slices, int64_t numel,
                   double divisor, c10::Half* out, void* stream);

}  // namespace tessera
#endif  // COMM_REDUCE_ORDERED_SUM_H_
