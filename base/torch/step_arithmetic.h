// Decides which arithmetic an optimizer's step uses. It is decided in one
// place, since the bits of training and those of the oracle
// (verify/oracle_step.h) depend on it, and the two share nothing else.
//
// The formulas (optim/formulas/formulas.h) have the same bits on the CPU and on
// every device that has kernels of ours. libtorch's own fused AdamW has other
// bits on a GPU than on the CPU, since its kernels are contracted there.
#ifndef BASE_TORCH_STEP_ARITHMETIC_H_
#define BASE_TORCH_STEP_ARITHMETIC_H_

#include "ATen/core/Tensor.h"
#include "c10/core/DeviceType.h"

namespace tessera {

// Returns whether masters of dtype `masters` on `device` are stepped by the
// formulas. Otherwise libtorch's operators step them: on devices without
// kernels, and for plain AdamW in a dtype other than float32 everywhere. LOCAL.
bool StepsByFormula(c10::DeviceType device, at::ScalarType masters,
                    bool plain_adamw);

// Says whether devices of that type have kernels of ours. LOCAL; called by
// RegisterDeviceKernels (optim/device_kernels.h).
void SetHasStepKernels(c10::DeviceType device, bool has);

}  // namespace tessera
#endif  // BASE_TORCH_STEP_ARITHMETIC_H_
