// Sums of slices in rank order: slice 0 + slice 1 + ..., element by element, so
// that the bits do not depend on where, or in which pieces, the sum is taken.
//
//   slices [ slice 0 .. | slice 1 .. | ... ]   num_slices * numel elements
//   out    [ sum ..     ]                      numel elements
//
// SumInOrder is the whole logic; the kernel and its CPU twin both call it.
#ifndef COMM_REDUCE_ORDERED_SUM_H_
#define COMM_REDUCE_ORDERED_SUM_H_

#include <cstdint>

#ifdef __CUDACC__
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif

namespace tessera {

// Element i of the sum. Starts with slice 0, not with zero: -0.0 stays -0.0.
template <typename T>
TESSERA_HOST_DEVICE inline T SumInOrder(const T* slices, int num_slices,
                                        int64_t numel, int64_t i) {
  T sum = slices[i];
  for (int s = 1; s < num_slices; ++s) sum = sum + slices[s * numel + i];
  return sum;
}

template <typename T>
void OrderedSumCpu(const T* slices, int num_slices, int64_t numel, T* out) {
  for (int64_t i = 0; i < numel; ++i) {
    out[i] = SumInOrder(slices, num_slices, numel, i);
  }
}

// On the GPU that is current. `stream` is a cudaStream_t. ASYNC: on `stream`.
// The return value is a cudaError_t, 0 if the launch went well. `out` may be
// any of the slices.
int OrderedSumCuda(const float* slices, int num_slices, int64_t numel,
                   float* out, void* stream);
int OrderedSumCuda(const double* slices, int num_slices, int64_t numel,
                   double* out, void* stream);

}  // namespace tessera
#endif  // COMM_REDUCE_ORDERED_SUM_H_
