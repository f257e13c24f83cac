// DeviceKernels: what an optimizer step does on a device that is not the CPU,
// as kernels on its current stream, without a wait of the host: the global norm
// in exact sums, what follows from it (clipping, overflow), and the optimizer's
// step with a working copy. Their bits are the CPU's.
//
//   AddToNorm   block sums of |x|^p (optim/norm/block_powers.h), added exactly
//               (optim/norm/exact_sum.h), to this rank's sum:  int64
//               [kNormWords]
//   FinishNorm  of all ranks' sums, gathered: norm, clipped norm, factor, skip:
//               float64 [kStepScalars]
//   Step        reads factor and skip from there
//
// One object for each kind of device (RegisterDeviceKernels); CUDA's is in
// optim/cuda.
#ifndef OPTIM_DEVICE_KERNELS_H_
#define OPTIM_DEVICE_KERNELS_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "absl/types/span.h"
#include "c10/core/DeviceType.h"
#include "optim/kernels/element_step.h"
#include "optim/step_scalars.h"

namespace tessera {

class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;

  // Whether AddToNorm of this dtype and FinishNorm have the CPU's bits for this
  // p.
  virtual bool HasNorm(double p, at::ScalarType dtype) const = 0;
  // As NormSum::Add. `sum`: int64 [kNormWords], on the segment's device. ASYNC:
  // on its current stream, as all below. REQUIRES: HasNorm.
  virtual void AddToNorm(const at::Tensor& segment, int64_t first, double p,
                         const at::Tensor& sum) const = 0;
  // `all`: int64 [ranks * kNormWords], ranks a multiple of the group's size;
  // `scalars`: float64 [kStepScalars]. ASYNC.
  virtual void FinishNorm(const at::Tensor& all, const NormFinish& finish,
                          const at::Tensor& scalars) const = 0;
  // StepElements of each, on memory of one device, of one type of masters and
  // of states, none empty. `scalars`: as FinishNorm wrote them, for the factor
  // (then that of `coefficients` is not read) and the skip; undefined: neither.
  // ASYNC.
  virtual void Step(Formula formula, absl::Span<const StepPart> parts,
                    const at::Tensor& scalars) const = 0;
};

// Null: there are none. LOCAL.
const DeviceKernels* DeviceKernelsOf(c10::DeviceType type);
// `kernels` lives as long as the process; null: there are none. LOCAL.
void RegisterDeviceKernels(c10::DeviceType type, const DeviceKernels* kernels);

}  // namespace tessera
#endif  // OPTIM_DEVICE_KERNELS_H_
