// Launches of an optimizer step's kernels (norm.cu, step.cu), on the GPU that
// is current. `stream` is a cudaStream_t. ASYNC: on `stream`. The return value
// is a cudaError_t, 0 if the launches succeeded. They must not be called in a
// build without CUDA.
#ifndef OPTIM_CUDA_KERNELS_H_
#define OPTIM_CUDA_KERNELS_H_

#include <cstdint>

#include "c10/util/BFloat16.h"
#include "c10/util/Half.h"
#include "optim/cuda/norm_math.h"
#include "optim/kernels/element_step.h"
#include "optim/step_scalars.h"

namespace tessera {

// `sum`: [kNormWords]. REQUIRES: between two calls of CarryNormCuda fewer than
// 2^32 blocks are added (a terabyte of float32).
int AddToNormCuda(const NormBatch<float>& batch, NormPower power, uint64_t* sum,
                  void* stream);
int AddToNormCuda(const NormBatch<double>& batch, NormPower power,
                  uint64_t* sum, void* stream);
int AddToNormCuda(const NormBatch<c10::BFloat16>& batch, NormPower power,
                  uint64_t* sum, void* stream);
int AddToNormCuda(const NormBatch<c10::Half>& batch, NormPower power,
                  uint64_t* sum, void* stream);

// Carries the digits: each is below 2^32 afterwards.
int CarryNormCuda(uint64_t* sum, void* stream);

// `all`: [ranks * kNormWords]; `scalars`: [kStepScalars].
int FinishNormCuda(const uint64_t* all, int64_t ranks, const NormFinish& finish,
                   double* scalars, void* stream);

// `parts`: `count` of them, of one master and
// state type. `scalars`: null, or [kStepScalars], of which factor and skip are
// read.
int StepCuda(Formula formula, const StepPart* parts, int64_t count,
             const double* scalars, void* stream);

}  // namespace tessera
#endif  // OPTIM_CUDA_KERNELS_H_
