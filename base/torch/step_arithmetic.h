// Which arithmetic an optimizer's step has: said once, since the bits of
// training and those of the oracle that it is compared with
// (verify/oracle_step.h) depend on it, and the two share nothing else.
//
// The formulas (optim/formulas/formulas.h) have the same bits on the CPU and on
// every device that has kernels of ours. libtorch's own fused AdamW has others
// on a GPU than on the CPU: its kernels are contracted there.
#ifndef BASE_TORCH_STEP_ARITHMETIC_H_
#define BASE_TORCH_STEP_ARITHMETIC_H_

#include "ATen/core/Tensor.h"
#include "c10/core/DeviceType.h"

namespace tessera {

// Whether masters that are stepped in that dtype are so by the formulas on such
// a device; else by libtorch's operators: on devices without kernels, and plain
// AdamW in another dtype than float32 everywhere. LOCAL.
bool StepsByFormula(c10::DeviceType device, at::ScalarType masters,
                    bool plain_adamw);

// Devices of that type have kernels of ours, or no longer. LOCAL; called by
// RegisterDeviceKernels (optim/device_kernels.h).
void SetHasStepKernels(c10::DeviceType device, bool has);

}  // namespace tessera
#endif  // BASE_TORCH_STEP_ARITHMETIC_H_
