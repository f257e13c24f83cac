// How the work of optim/cuda/norm_math.h is shared out:
//
//   8 threads     a block of 64 elements: a lane each, joined by shuffles; the
//                 first of them has a window of digits in registers
//   thread block  digits in shared memory, into which windows are emptied
//   grid          digits in global memory
//
// All that is added there is whole numbers, so the order does not matter.
#include <cuda_runtime.h>

#include <algorithm>

#include "optim/cuda/kernels.h"

namespace tessera {
namespace {

constexpr int kThreads = 256;
constexpr int kGroups = kThreads / kNormLanes;
// Some eight for each processor of a large GPU.
constexpr int64_t kMaxGrid = 1056;
// Threads of the kernels with a digit for each thread.
constexpr int kDigitThreads = 96;
static_assert(kNormWords <= kDigitThreads && kNormWords <= kThreads, "");

__device__ void AtomicAdd(uint64_t* to, uint64_t x) {
  if (x != 0) atomicAdd(reinterpret_cast<unsigned long long*>(to), x);
}
__device__ void AtomicMax(uint64_t* to, uint64_t x) {
  if (x != 0) atomicMax(reinterpret_cast<unsigned long long*>(to), x);
}

__device__ void Flush(const DigitWindow& window, uint64_t* words) {
  for (int i = 0; i < DigitWindow::kDigits; ++i) {
    AtomicAdd(words + window.low + i, window.digits[i]);
  }
}

template <NormPower kPower>
__device__ void AddBlock(double block, DigitWindow* window, uint64_t* extreme,
                         uint64_t* words) {
  if (IsExtreme<kPower>(block)) {
    const uint64_t bits = BitCast<uint64_t>(OneNan(block));
    if (bits > *extreme) *extreme = bits;
    return;
  }
  if (block == 0) return;
  const SplitDouble split(block);
  if (!window->Takes(split)) {
    Flush(*window, words);
    *window = DigitWindow();
    window->low = split.digit;
  }
  window->Add(split);
}

template <NormPower kPower, typename T>
__global__ void __launch_bounds__(kThreads)
    AddKernel(const __grid_constant__ NormBatch<T> batch, uint64_t* sum) {
  __shared__ uint64_t words[kNormWords];
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kNormWords) words[thread] = 0;
  __syncthreads();
  const int lane = thread % kNormLanes;
  const unsigned lanes = 0xffu << (thread % 32 - lane);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kGroups;
  DigitWindow window;
  uint64_t extreme = 0;
  int64_t block =
      static_cast<int64_t>(blockIdx.x) * kGroups + thread / kNormLanes;
  int at = 0;
  for (; block < batch.blocks(); block += step) {
    at = batch.SegmentOf(block, at);
    double x = LaneSum<kPower>(batch.segments[at],
                               block - batch.first_block[at], lane);
    for (int distance = 1; distance < kNormLanes; distance *= 2) {
      x = Join<kPower>(x, __shfl_xor_sync(lanes, x, distance));
    }
    if (lane == 0) AddBlock<kPower>(x, &window, &extreme, words);
  }
  Flush(window, words);
  AtomicMax(words + kNormDigits, extreme);
  __syncthreads();
  if (thread < kNormDigits) AtomicAdd(sum + thread, words[thread]);
  if (thread == kNormDigits) AtomicMax(sum + thread, words[thread]);
}

// Carries the digits of a thread block; `digits` is shared memory, where thread
// i has written digit i.
__device__ void Carry(uint64_t* digits) {
  const int i = static_cast<int>(threadIdx.x);
  const bool mine = i < kNormDigits;
  while (__syncthreads_or(mine && !IsCarried(digits, i))) {
    const uint64_t carried = mine ? CarryStep(digits, i) : 0;
    __syncthreads();
    if (mine) digits[i] = carried;
  }
}

__global__ void CarryKernel(uint64_t* sum) {
  __shared__ uint64_t digits[kNormDigits];
  const int i = static_cast<int>(threadIdx.x);
  if (i < kNormDigits) digits[i] = sum[i];
  Carry(digits);
  if (i < kNormDigits) sum[i] = digits[i];
}

__global__ void FinishKernel(const uint64_t* all, int64_t ranks,
                             NormFinish finish, double* scalars) {
  __shared__ uint64_t first[kNormWords], words[kNormWords];
  const int i = static_cast<int>(threadIdx.x);
  const bool mine = i < kNormWords;
  int64_t differs = 0;
  for (int64_t begin = 0; begin < ranks; begin += finish.group_size) {
    const int64_t end = begin + finish.group_size;
    if (mine) words[i] = WordOfGroup(all, begin, end, i);
    Carry(words);
    if (mine && begin == 0) first[i] = words[i];
    const bool other = __syncthreads_or(mine && words[i] != first[i]);
    if (other && differs == 0) differs = begin + 1;
  }
  if (i == 0) WriteScalars(first, finish, differs, scalars);
}

template <NormPower kPower, typename T>
void LaunchAdd(const NormBatch<T>& batch, uint64_t* sum, cudaStream_t stream) {
  const int64_t grid =
      std::min((batch.blocks() + kGroups - 1) / kGroups, kMaxGrid);
  AddKernel<kPower, T>
      <<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(batch, sum);
}

template <typename T>
int Add(const NormBatch<T>& batch, NormPower power, uint64_t* sum,
        void* stream) {
  if (batch.blocks() == 0) return cudaSuccess;
  const auto on = static_cast<cudaStream_t>(stream);
  switch (power) {
    case NormPower::kOne:
      LaunchAdd<NormPower::kOne>(batch, sum, on);
      break;
    case NormPower::kTwo:
      LaunchAdd<NormPower::kTwo>(batch, sum, on);
      break;
    case NormPower::kInfinity:
      LaunchAdd<NormPower::kInfinity>(batch, sum, on);
      break;
  }
  return cudaGetLastError();
}

}  // namespace

int AddToNormCuda(const NormBatch<float>& batch, NormPower power, uint64_t* sum,
                  void* stream) {
  return Add(batch, power, sum, stream);
}
int AddToNormCuda(const NormBatch<double>& batch, NormPower power,
                  uint64_t* sum, void* stream) {
  return Add(batch, power, sum, stream);
}
int AddToNormCuda(const NormBatch<c10::BFloat16>& batch, NormPower power,
                  uint64_t* sum, void* stream) {
  return Add(batch, power, sum, stream);
}
int AddToNormCuda(const NormBatch<c10::Half>& batch, NormPower power,
                  uint64_t* sum, void* stream) {
  return Add(batch, power, sum, stream);
}

int CarryNormCuda(uint64_t* sum, void* stream) {
  CarryKernel<<<1, kDigitThreads, 0, static_cast<cudaStream_t>(stream)>>>(sum);
  return cudaGetLastError();
}

int FinishNormCuda(const uint64_t* all, int64_t ranks, const NormFinish& finish,
                   double* scalars, void* stream) {
  FinishKernel<<<1, kDigitThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      all, ranks, finish, scalars);
  return cudaGetLastError();
}

}  // namespace tessera
