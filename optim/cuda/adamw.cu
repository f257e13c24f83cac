// AdamW: each thread does elements of a range by AdamWStep, four at a time
// where all memory is aligned for that. One pass: masters, moments, working
// copy.
#include <cuda_runtime.h>

#include <algorithm>

#include "optim/cuda/adamw_element.h"
#include "optim/cuda/kernels.h"

namespace tessera {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxGrid = 4096;
constexpr int kWidth = 4;

// What kWidth elements are loaded and stored as.
struct alignas(16) Floats {
  float x[kWidth];
};
struct alignas(8) Halves {
  uint16_t x[kWidth];
};

// Where the threads are to find factor and skip, if not in the constants.
__device__ bool TakeScalars(const double* scalars, AdamWConstants* k) {
  if (scalars == nullptr) return true;
  k->c.gradient_factor = static_cast<float>(scalars[kFactor]);
  return scalars[kSkip] == 0;
}

template <WorkingType kWorking>
__device__ uint16_t HalfOf(float x) {
  return kWorking == WorkingType::kBFloat16 ? BFloat16BitsOf(x)
                                            : Float16BitsOf(x);
}

template <WorkingType kWorking>
__device__ void StepOne(const AdamWRange& r, const AdamWConstants& k,
                        int64_t i) {
  const AdamWElement after =
      AdamWStep({r.master[i], r.exp_avg[i], r.exp_avg_sq[i]}, r.gradient[i], k);
  r.master[i] = after.master;
  r.exp_avg[i] = after.exp_avg;
  r.exp_avg_sq[i] = after.exp_avg_sq;
  if constexpr (kWorking == WorkingType::kFloat32) {
    static_cast<float*>(r.working)[i] = after.master;
  } else if constexpr (kWorking != WorkingType::kNone) {
    static_cast<uint16_t*>(r.working)[i] = HalfOf<kWorking>(after.master);
  }
}

// Elements kWidth * i and those after it.
template <WorkingType kWorking>
__device__ void StepWide(const AdamWRange& r, const AdamWConstants& k,
                         int64_t i) {
  Floats master = reinterpret_cast<Floats*>(r.master)[i];
  Floats exp_avg = reinterpret_cast<Floats*>(r.exp_avg)[i];
  Floats exp_avg_sq = reinterpret_cast<Floats*>(r.exp_avg_sq)[i];
  const Floats gradient = reinterpret_cast<const Floats*>(r.gradient)[i];
  Halves halves;
  for (int j = 0; j < kWidth; ++j) {
    const AdamWElement after = AdamWStep(
        {master.x[j], exp_avg.x[j], exp_avg_sq.x[j]}, gradient.x[j], k);
    master.x[j] = after.master;
    exp_avg.x[j] = after.exp_avg;
    exp_avg_sq.x[j] = after.exp_avg_sq;
    halves.x[j] = HalfOf<kWorking>(after.master);
  }
  reinterpret_cast<Floats*>(r.master)[i] = master;
  reinterpret_cast<Floats*>(r.exp_avg)[i] = exp_avg;
  reinterpret_cast<Floats*>(r.exp_avg_sq)[i] = exp_avg_sq;
  if constexpr (kWorking == WorkingType::kFloat32) {
    static_cast<Floats*>(r.working)[i] = master;
  } else if constexpr (kWorking != WorkingType::kNone) {
    static_cast<Halves*>(r.working)[i] = halves;
  }
}

// `wide`: how many times kWidth elements are done at once, from the first on.
template <WorkingType kWorking>
__global__ void __launch_bounds__(kThreads)
    AdamWKernel(AdamWRange r, AdamWConstants k, int64_t wide,
                const double* scalars) {
  if (!TakeScalars(scalars, &k)) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t i = first; i < wide; i += step) StepWide<kWorking>(r, k, i);
  for (int64_t i = wide * kWidth + first; i < r.numel; i += step) {
    StepOne<kWorking>(r, k, i);
  }
}

bool IsAligned(const AdamWRange& r) {
  const auto at = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  const uintptr_t floats =
      at(r.master) | at(r.exp_avg) | at(r.exp_avg_sq) | at(r.gradient);
  const size_t item =
      r.working_type == WorkingType::kFloat32 ? sizeof(Floats) : sizeof(Halves);
  return floats % sizeof(Floats) == 0 &&
         (r.working_type == WorkingType::kNone || at(r.working) % item == 0);
}

template <WorkingType kWorking>
void Launch(const AdamWRange& r, const AdamWConstants& k, const double* scalars,
            cudaStream_t stream) {
  const int64_t wide = IsAligned(r) ? r.numel / kWidth : 0;
  const int64_t turns = std::max(wide, r.numel - wide * kWidth);
  const int64_t grid = std::min((turns + kThreads - 1) / kThreads, kMaxGrid);
  AdamWKernel<kWorking><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(
      r, k, wide, scalars);
}

}  // namespace

int AdamWCuda(const AdamWRange& range, const AdamWCoefficients& coefficients,
              const double* scalars, void* stream) {
  if (range.numel == 0) return cudaSuccess;
  const AdamWConstants k(coefficients);
  const auto on = static_cast<cudaStream_t>(stream);
  switch (range.working_type) {
    case WorkingType::kNone:
      Launch<WorkingType::kNone>(range, k, scalars, on);
      break;
    case WorkingType::kFloat32:
      Launch<WorkingType::kFloat32>(range, k, scalars, on);
      break;
    case WorkingType::kBFloat16:
      Launch<WorkingType::kBFloat16>(range, k, scalars, on);
      break;
    case WorkingType::kFloat16:
      Launch<WorkingType::kFloat16>(range, k, scalars, on);
      break;
  }
  return cudaGetLastError();
}

}  // namespace tessera
