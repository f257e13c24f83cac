#include <cuda_runtime.h>

#include <algorithm>

#include "comm/reduce/ordered_sum.h"

namespace tessera {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;

template <typename T>
__global__ void OrderedSumKernel(const T* slices, int num_slices, int64_t numel,
                                 double divisor, T* out) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i < numel; i += step) {
    out[i] = SumInOrder(slices, num_slices, numel, divisor, i);
  }
}

template <typename T>
int Launch(const T* slices, int num_slices, int64_t numel, double divisor,
           T* out, void* stream) {
  if (numel == 0) return cudaSuccess;
  const int64_t blocks =
      std::min((numel + kThreads - 1) / kThreads, kMaxBlocks);
  OrderedSumKernel<<<static_cast<unsigned>(blocks), kThreads, 0,
                     static_cast<cudaStream_t>(stream)>>>(slices, num_slices,
                                                          numel, divisor, out);
  return cudaGetLastError();
}

}  // namespace

int OrderedSumCuda(const float* slices, int num_slices, int64_t numel,
                   double divisor, float* out, void* stream) {
  return Launch(slices, num_slices, numel, divisor, out, stream);
}

int OrderedSumCuda(const double* slices, int num_slices, int64_t numel,
                   double divisor, double* out, void* stream) {
  return Launch(slices, num_slices, numel, divisor, out, stream);
}

int OrderedSumCuda(const c10::BFloat16* slices, int num_slices, int64_t numel,
                   double divisor, c10::BFloat16* out, void* stream) {
  return Launch(slices, num_slices, numel, divisor, out, stream);
}

int OrderedSumCuda(const c10::Half* slices, int num_slices, int64_t numel,
                   double divisor, c10::Half* out, void* stream) {
  return Launch(slices, num_slices, numel, divisor, out, stream);
}

}  // namespace tessera
