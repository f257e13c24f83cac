#include "comm/device/gpu_sum.h"

#include <cuda_runtime.h>

#include "absl/strings/str_cat.h"
#include "c10/cuda/CUDAStream.h"
#include "comm/device/device_transport.h"
#include "comm/reduce/ordered_sum.h"

namespace tessera {
namespace {

template <typename T>
int SumOnGpu(const at::Tensor& slices, double divisor, const at::Tensor& sum) {
  const int64_t numel = sum.numel();
  return OrderedSumCuda(slices.const_data_ptr<T>(),
                        static_cast<int>(slices.numel() / numel), numel,
                        divisor, sum.mutable_data_ptr<T>(),
                        c10::cuda::getCurrentCUDAStream().stream());
}

}  // namespace

absl::Status OrderedSumOnGpu(const at::Tensor& slices, double divisor,
                             const at::Tensor& sum) {
  int error = 0;
  switch (sum.scalar_type()) {
    case at::kFloat:
      error = SumOnGpu<float>(slices, divisor, sum);
      break;
    case at::kDouble:
      error = SumOnGpu<double>(slices, divisor, sum);
      break;
    case at::kBFloat16:
      error = SumOnGpu<c10::BFloat16>(slices, divisor, sum);
      break;
    case at::kHalf:
      error = SumOnGpu<c10::Half>(slices, divisor, sum);
      break;
    default:
      AddSlices(slices, divisor, sum);
  }
  if (error == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      "ordered sum: ", cudaGetErrorString(static_cast<cudaError_t>(error))));
}

}  // namespace tessera
