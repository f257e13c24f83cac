// DeviceKernels: the kernels of an optimizer step on a device other than the
// CPU, on its current stream and without a wait of the host: the global norm in
// exact sums, what follows from it (clipping, overflow), and the optimizer's
// step with a working copy. Their bits are the CPU's.
//
//   AddToNorm   block sums of |x|^p (optim/norm/block_powers.h), added exactly
//               (optim/norm/exact_sum.h), to this rank's sum:  int64
//               [kNormWords]
//   FinishNorm  of all ranks' sums, gathered: norm, clipped norm, factor, skip:
//               float64 [kStepScalars]
//   Step        reads factor and skip from there
//
// There is one object for each kind of device (RegisterDeviceKernels); CUDA's
// is in optim/cuda.
#ifndef OPTIM_DEVICE_KERNELS_H_
#define OPTIM_DEVICE_KERNELS_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "absl/types/span.h"
#include "c10/core/DeviceType.h"
#include "optim/kernels/element_step.h"
#include "optim/step_scalars.h"

namespace tessera {

// Neighbours of one parameter, as NormSum::Add takes them.
struct NormPart {
  at::Tensor segment;
  int64_t first = 0;
};

class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;

  // Whether AddToNorm for this dtype and FinishNorm have the CPU's bits for
  // this p.
  virtual bool HasNorm(double p, at::ScalarType dtype) const = 0;
  // Adds the parts to `sum`, in few launches. `sum`: int64 [kNormWords], on
  // the parts' device. ASYNC: on its current stream, as all below. REQUIRES:
  // HasNorm of all dtypes.
  virtual void AddToNorm(absl::Span<const NormPart> parts, double p,
                         const at::Tensor& sum) const = 0;
  // `all`: int64 [ranks * kNormWords], ranks a multiple of the group's size;
  // `scalars`: float64 [kStepScalars]. ASYNC.
  virtual void FinishNorm(const at::Tensor& all, const NormFinish& finish,
                          const at::Tensor& scalars) const = 0;
  // Runs StepElements for each part; parts are on one device, have one type of
  // masters and one of states, and are not empty. `scalars`: FinishNorm's, for
  // the factor (then that of `coefficients` is not read) and the skip;
  // undefined: neither. ASYNC.
  virtual void Step(Formula formula, absl::Span<const StepPart> parts,
                    const at::Tensor& scalars) const = 0;
};

// Returns the kernels of a kind of device; null: there are none. LOCAL.
const DeviceKernels* DeviceKernelsOf(c10::DeviceType type);
// Registers kernels, which live as long as the process; null: there are none.
// LOCAL.
void RegisterDeviceKernels(c10::DeviceType type, const DeviceKernels* kernels);

}  // namespace tessera
#endif  // OPTIM_DEVICE_KERNELS_H_
