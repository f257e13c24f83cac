// The optimizer's step of many ranges in one launch: each block of threads
// takes elements of one of them. One pass: masters, states, working copy.
//
//   float32, bfloat16 states   kWidth elements to a thread, loaded at once
//                              where memory is aligned for that
//   8-bit states               a block of 64 elements to a warp, two to a lane
//   float64                    one element to a thread
#include <cuda_runtime.h>

#include <algorithm>

#include "optim/cuda/kernels.h"
#include "optim/cuda/step_element.h"

namespace tessera {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 4;
constexpr int64_t kBlockElements = 16384;  // at least, of one block of threads
constexpr int64_t kMaxBlocks = 4096;       // of one range
constexpr int kMaxParts = 12;              // of a launch: 4 KiB of arguments

// Which blocks of threads do which range.
struct Batch {
  StepRange ranges[kMaxParts];
  StepCoefficients coefficients[kMaxParts];
  int first_block[kMaxParts + 1];
  int count;
};

// What a thread is to do: its number among those of its range, and theirs.
struct Share {
  int part;
  int64_t thread, threads;
};
__device__ Share ShareOf(const Batch& batch) {
  int part = 0;
  const int block = static_cast<int>(blockIdx.x);
  while (block >= batch.first_block[part + 1]) ++part;
  const int first = batch.first_block[part];
  return {part, static_cast<int64_t>(block - first) * kThreads + threadIdx.x,
          static_cast<int64_t>(batch.first_block[part + 1] - first) * kThreads};
}

// Where the threads are to find factor and skip, if not in the constants.
template <typename T>
__device__ bool TakeScalars(const double* scalars, StepConstants<T>* k) {
  if (scalars == nullptr) return true;
  k->SetFactor(scalars[kFactor]);
  return scalars[kSkip] == 0;
}

__device__ float FloatAt(const void* from, NumberType type, int64_t i) {
  if (type == NumberType::kFloat32) return static_cast<const float*>(from)[i];
  const uint16_t half = static_cast<const uint16_t*>(from)[i];
  return type == NumberType::kBFloat16 ? FloatOfBFloat16(half)
                                       : FloatOfFloat16(half);
}

template <typename T>
__device__ void SetAverage(const StepRange& r, const StepConstants<T>& k,
                           int64_t i, T master) {
  if (r.average == nullptr) return;
  T* const average = static_cast<T*>(r.average) + i;
  *average = AverageOf(k, *average, master);
}

__device__ uint16_t WorkingBitsOf(const StepRange& r, float master) {
  if (r.master_type == NumberType::kRemainder) return UpperBitsOf(master);
  return r.working_type == NumberType::kFloat16 ? Float16BitsOf(master)
                                                : BFloat16BitsOf(master);
}

__device__ void SetWorking(const StepRange& r, int64_t i, float master) {
  if (r.working_type == NumberType::kFloat32) {
    static_cast<float*>(r.working)[i] = master;
  } else if (r.working_type != NumberType::kNone) {
    static_cast<uint16_t*>(r.working)[i] = WorkingBitsOf(r, master);
  }
}

__device__ float MasterAt(const StepRange& r, int64_t i) {
  if (r.master_type != NumberType::kRemainder) {
    return FloatAt(r.master, r.master_type, i);
  }
  return JoinedMasterOf(static_cast<const uint16_t*>(r.working)[i],
                        static_cast<const uint16_t*>(r.master)[i]);
}

// What is stored of a master that is not float32. `number`: in the parameter.
__device__ uint16_t MasterBitsOf(const StepRange& r, uint64_t seed,
                                 int64_t number, float master) {
  return r.master_type == NumberType::kRemainder
             ? RemainderBitsOf(master)
             : NarrowMasterBitsOf(master, r.master_type,
                                  static_cast<uint64_t>(number), seed);
}

__device__ void* MastersTo(const StepRange& r) {
  return r.new_master == nullptr ? r.master : r.new_master;
}

__device__ void SetMaster(const StepRange& r, uint64_t seed, int64_t i,
                          float master) {
  if (r.master_type == NumberType::kFloat32) {
    static_cast<float*>(MastersTo(r))[i] = master;
  } else {
    static_cast<uint16_t*>(MastersTo(r))[i] =
        MasterBitsOf(r, seed, r.number + i, master);
  }
}

// kWidth elements as they lie in memory, of float32 or of 16 bits.
struct alignas(16) Wide32 {
  float x[kWidth];
};
struct alignas(8) Wide16 {
  uint16_t x[kWidth];
};
__device__ void LoadWide(const void* from, NumberType type, int64_t i,
                         float* to) {
  if (type == NumberType::kFloat32) {
    const Wide32 wide = static_cast<const Wide32*>(from)[i];
    for (int j = 0; j < kWidth; ++j) to[j] = wide.x[j];
    return;
  }
  const Wide16 wide = static_cast<const Wide16*>(from)[i];
  for (int j = 0; j < kWidth; ++j) {
    to[j] = type == NumberType::kBFloat16 ? FloatOfBFloat16(wide.x[j])
                                          : FloatOfFloat16(wide.x[j]);
  }
}

__device__ void LoadMasters(const StepRange& r, int64_t i, float* to) {
  if (r.master_type != NumberType::kRemainder) {
    return LoadWide(r.master, r.master_type, i, to);
  }
  const Wide16 working = static_cast<const Wide16*>(r.working)[i];
  const Wide16 remainders = static_cast<const Wide16*>(r.master)[i];
  for (int j = 0; j < kWidth; ++j) {
    to[j] = JoinedMasterOf(working.x[j], remainders.x[j]);
  }
}

template <typename F>
__device__ void StepAt(const StepRange& r, const StepConstants<float>& k,
                       int64_t i) {
  StepElement<float> e;
  e.master.x = MasterAt(r, i);
  for (int s = 0; s < F::kStates; ++s) {
    e.states[s].x = FloatAt(r.states[s], r.state_type, i);
  }
  StepOneElement<F>(k, FloatAt(r.gradient, r.gradient_type, i), &e);
  SetMaster(r, k.seed, i, e.master.x);
  const uint32_t random =
      r.state_type == NumberType::kBFloat16
          ? RandomBitsOf(static_cast<uint64_t>(r.number + i), k.seed)
          : 0;
  for (int s = 0; s < F::kStates; ++s) {
    if (r.state_type == NumberType::kFloat32) {
      static_cast<float*>(r.states[s])[i] = e.states[s].x;
    } else {
      static_cast<uint16_t*>(r.states[s])[i] =
          BFloat16StateBitsOf(e.states[s].x, s, random);
    }
  }
  SetAverage(r, k, i, e.master.x);
  SetWorking(r, i, e.master.x);
}

// Elements kWidth * i and those after it.
template <typename F>
__device__ void StepWideAt(const StepRange& r, const StepConstants<float>& k,
                           int64_t i) {
  float gradient[kWidth], states[F::kStates + 1][kWidth];
  Wide32 master;
  LoadMasters(r, i, master.x);
  LoadWide(r.gradient, r.gradient_type, i, gradient);
  for (int s = 0; s < F::kStates; ++s) {
    LoadWide(r.states[s], r.state_type, i, states[s]);
  }
  const bool narrow = r.state_type == NumberType::kBFloat16;
  const bool narrow_master = r.master_type != NumberType::kFloat32;
  Wide16 working, new_master, narrow_states[F::kStates + 1];
  for (int j = 0; j < kWidth; ++j) {
    StepElement<float> e;
    e.master.x = master.x[j];
    for (int s = 0; s < F::kStates; ++s) e.states[s].x = states[s][j];
    StepOneElement<F>(k, gradient[j], &e);
    master.x[j] = e.master.x;
    new_master.x[j] =
        narrow_master
            ? MasterBitsOf(r, k.seed, r.number + i * kWidth + j, e.master.x)
            : 0;
    const uint32_t random =
        narrow ? RandomBitsOf(static_cast<uint64_t>(r.number + i * kWidth + j),
                              k.seed)
               : 0;
    for (int s = 0; s < F::kStates; ++s) {
      states[s][j] = e.states[s].x;
      narrow_states[s].x[j] =
          narrow ? BFloat16StateBitsOf(e.states[s].x, s, random) : 0;
    }
    working.x[j] = WorkingBitsOf(r, e.master.x);
  }
  if (narrow_master) {
    static_cast<Wide16*>(MastersTo(r))[i] = new_master;
  } else {
    static_cast<Wide32*>(MastersTo(r))[i] = master;
  }
  if (r.average != nullptr) {
    Wide32 average = static_cast<const Wide32*>(r.average)[i];
    for (int j = 0; j < kWidth; ++j) {
      average.x[j] = AverageOf(k, average.x[j], master.x[j]);
    }
    static_cast<Wide32*>(r.average)[i] = average;
  }
  for (int s = 0; s < F::kStates; ++s) {
    if (narrow) {
      static_cast<Wide16*>(r.states[s])[i] = narrow_states[s];
      continue;
    }
    Wide32 wide;
    for (int j = 0; j < kWidth; ++j) wide.x[j] = states[s][j];
    static_cast<Wide32*>(r.states[s])[i] = wide;
  }
  if (r.working_type == NumberType::kFloat32) {
    static_cast<Wide32*>(r.working)[i] = master;
  } else if (r.working_type != NumberType::kNone) {
    static_cast<Wide16*>(r.working)[i] = working;
  }
}

__device__ bool IsAligned(const StepRange& r, int states) {
  const auto aligned = [](const void* p, NumberType type) {
    const size_t to =
        type == NumberType::kFloat32 ? sizeof(Wide32) : sizeof(Wide16);
    return type == NumberType::kNone ||
           reinterpret_cast<uintptr_t>(p) % to == 0;
  };
  bool all = aligned(r.master, r.master_type) &&
             aligned(r.new_master, r.master_type) &&
             aligned(r.average, NumberType::kFloat32) &&
             aligned(r.gradient, r.gradient_type) &&
             aligned(r.working, r.working_type);
  for (int s = 0; s < states; ++s) {
    all = all && aligned(r.states[s], r.state_type);
  }
  return all;
}

template <typename F>
__global__ void __launch_bounds__(kThreads)
    StepKernel(const __grid_constant__ Batch batch, const double* scalars) {
  const Share share = ShareOf(batch);
  const StepRange& r = batch.ranges[share.part];
  StepConstants<float> k(batch.coefficients[share.part]);
  if (!TakeScalars(scalars, &k)) return;
  const int64_t wide = IsAligned(r, F::kStates) ? r.numel / kWidth : 0;
  for (int64_t i = share.thread; i < wide; i += share.threads) {
    StepWideAt<F>(r, k, i);
  }
  for (int64_t i = wide * kWidth + share.thread; i < r.numel;
       i += share.threads) {
    StepAt<F>(r, k, i);
  }
}

template <typename F>
__global__ void __launch_bounds__(kThreads)
    StepDoublesKernel(const __grid_constant__ Batch batch,
                      const double* scalars) {
  const Share share = ShareOf(batch);
  const StepRange& r = batch.ranges[share.part];
  StepConstants<double> k(batch.coefficients[share.part]);
  if (!TakeScalars(scalars, &k)) return;
  for (int64_t i = share.thread; i < r.numel; i += share.threads) {
    StepElement<double> e;
    e.master.x = static_cast<const double*>(r.master)[i];
    for (int s = 0; s < F::kStates; ++s) {
      e.states[s].x = static_cast<const double*>(r.states[s])[i];
    }
    StepOneElement<F>(k, static_cast<const double*>(r.gradient)[i], &e);
    static_cast<double*>(MastersTo(r))[i] = e.master.x;
    SetAverage(r, k, i, e.master.x);
    for (int s = 0; s < F::kStates; ++s) {
      static_cast<double*>(r.states[s])[i] = e.states[s].x;
    }
  }
}

// A state's block by a warp: lane l has elements 2 * l and 2 * l + 1.
__device__ void StoreBlock8(const uint32_t* words, bool non_negative, int lane,
                            unsigned char* to) {
  uint32_t most = kBlock8LeastScale;
  for (int j = 0; j < 2; ++j) most = max(most, words[j] & 0x7fffffffu);
  for (int offset = 16; offset > 0; offset /= 2) {
    most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
  }
  const uint32_t scale = Block8ScaleOf(most);
  for (int j = 0; j < 2; ++j) {
    to[2 * lane + j] = Block8CodeOf(words[j], scale, non_negative);
  }
  if (lane == 0) *reinterpret_cast<uint32_t*>(to + kBlock8Elements) = scale;
}

template <typename F>
__global__ void __launch_bounds__(kThreads)
    StepBlock8Kernel(const __grid_constant__ Batch batch,
                     const double* scalars) {
  const Share share = ShareOf(batch);
  const StepRange& r = batch.ranges[share.part];
  StepConstants<float> k(batch.coefficients[share.part]);
  if (!TakeScalars(scalars, &k)) return;
  const int lane = static_cast<int>(share.thread % 32);
  const int64_t blocks =
      (r.in_block + r.numel + kBlock8Elements - 1) / kBlock8Elements;
  for (int64_t b = share.thread / 32; b < blocks; b += share.threads / 32) {
    float states[F::kStates + 1][2];
    for (int s = 0; s < F::kStates; ++s) {
      const auto* const from =
          static_cast<const unsigned char*>(r.states[s]) + b * kBlock8Bytes;
      const uint32_t scale =
          *reinterpret_cast<const uint32_t*>(from + kBlock8Elements);
      for (int j = 0; j < 2; ++j) {
        states[s][j] =
            Block8ValueOf(from[2 * lane + j], scale, IsNonNegative<F>(s));
      }
    }
    for (int j = 0; j < 2; ++j) {
      const int64_t i = b * kBlock8Elements + 2 * lane + j - r.in_block;
      if (i < 0 || i >= r.numel) continue;
      StepElement<float> e;
      e.master.x = MasterAt(r, i);
      for (int s = 0; s < F::kStates; ++s) e.states[s].x = states[s][j];
      StepOneElement<F>(k, FloatAt(r.gradient, r.gradient_type, i), &e);
      SetMaster(r, k.seed, i, e.master.x);
      for (int s = 0; s < F::kStates; ++s) states[s][j] = e.states[s].x;
      SetAverage(r, k, i, e.master.x);
      SetWorking(r, i, e.master.x);
    }
    __syncwarp();  // all have read the old scale
    uint32_t random[2];
    for (int j = 0; j < 2; ++j) {
      const int64_t i = b * kBlock8Elements + 2 * lane + j - r.in_block;
      random[j] = RandomBitsOf(static_cast<uint64_t>(r.number + i), k.seed);
    }
    for (int s = 0; s < F::kStates; ++s) {
      uint32_t words[2];
      for (int j = 0; j < 2; ++j) {
        words[j] = Block8WordOf(states[s][j], s, random[j]);
      }
      StoreBlock8(words, IsNonNegative<F>(s), lane,
                  static_cast<unsigned char*>(r.states[s]) + b * kBlock8Bytes);
    }
  }
}

template <typename F>
void Launch(const Batch& batch, const double* scalars, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(batch.first_block[batch.count]);
  const StepRange& first = batch.ranges[0];
  if (first.master_type == NumberType::kFloat64) {
    StepDoublesKernel<F><<<blocks, kThreads, 0, stream>>>(batch, scalars);
  } else if (first.state_type == NumberType::kBlock8 && F::kStates > 0) {
    StepBlock8Kernel<F><<<blocks, kThreads, 0, stream>>>(batch, scalars);
  } else {
    StepKernel<F><<<blocks, kThreads, 0, stream>>>(batch, scalars);
  }
}

}  // namespace

int StepCuda(Formula formula, const StepPart* parts, int64_t count,
             const double* scalars, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  for (int64_t begin = 0; begin < count; begin += kMaxParts) {
    Batch batch;
    batch.count = static_cast<int>(std::min<int64_t>(kMaxParts, count - begin));
    batch.first_block[0] = 0;
    for (int p = 0; p < batch.count; ++p) {
      const StepPart& part = parts[begin + p];
      batch.ranges[p] = part.range;
      batch.coefficients[p] = part.coefficients;
      const int64_t blocks = std::min(
          (part.range.numel + kBlockElements - 1) / kBlockElements, kMaxBlocks);
      batch.first_block[p + 1] =
          batch.first_block[p] + static_cast<int>(blocks);
    }
    if (batch.first_block[batch.count] == 0) continue;
    VisitFormula(formula,
                 [&](auto f) { Launch<decltype(f)>(batch, scalars, on); });
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace tessera
