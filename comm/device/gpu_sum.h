// Sums in rank order of tensors of a GPU. Only in builds with CUDA.
#ifndef COMM_DEVICE_GPU_SUM_H_
#define COMM_DEVICE_GPU_SUM_H_

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"

namespace tessera {

// As DeviceTransportOptions::ordered_sum, of any dtype: by the kernel of
// comm/reduce/ordered_sum.h where that has it. ASYNC: on the current stream of
// the current GPU. Internal if it cannot be launched.
absl::Status OrderedSumOnGpu(const at::Tensor& slices, double divisor,
                             const at::Tensor& sum);

}  // namespace tessera
#endif  // COMM_DEVICE_GPU_SUM_H_
