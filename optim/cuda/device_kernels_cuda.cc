// DeviceKernels (optim/device_kernels.h) of CUDA. They are registered when the
// program starts; a program without a GPU never calls them.
#include <cuda_runtime.h>

#include <cstdint>

#include "ATen/Context.h"
#include "ATen/core/Tensor.h"
#include "c10/cuda/CUDAException.h"
#include "c10/cuda/CUDAGuard.h"
#include "c10/cuda/CUDAStream.h"
#include "optim/cuda/kernels.h"
#include "optim/cuda/norm_batches.h"
#include "optim/device_kernels.h"

namespace tessera {
namespace {

// Makes a device current, and takes its current stream.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device)
      : guard_(device),
        stream_(c10::cuda::getCurrentCUDAStream(device.index())) {}
  void* stream() const { return stream_.stream(); }

 private:
  const c10::cuda::CUDAGuard guard_;
  const c10::cuda::CUDAStream stream_;
};

void Check(int error) { C10_CUDA_CHECK(static_cast<cudaError_t>(error)); }

class CudaKernels final : public DeviceKernels {
 public:
  bool HasNorm(double p, at::ScalarType dtype) const override {
    return HasNormPower(p) && (!at::isComplexType(dtype) || p == 2);
  }

  void AddToNorm(absl::Span<const NormPart> parts, double p,
                 const at::Tensor& sum) const override {
    const OnDevice on(sum.device());
    auto* const words =
        reinterpret_cast<uint64_t*>(sum.mutable_data_ptr<int64_t>());
    bool any = false;
    VisitNormBatches(parts, [&](const auto& batch) {
      Check(AddToNormCuda(batch, NormPowerOf(p), words, on.stream()));
      any = true;
    });
    if (any) Check(CarryNormCuda(words, on.stream()));
  }

  void FinishNorm(const at::Tensor& all, const NormFinish& finish,
                  const at::Tensor& scalars) const override {
    const OnDevice on(all.device());
    Check(FinishNormCuda(
        reinterpret_cast<const uint64_t*>(all.const_data_ptr<int64_t>()),
        all.numel() / kNormWords, finish, scalars.mutable_data_ptr<double>(),
        on.stream()));
  }

  void Step(Formula formula, absl::Span<const StepPart> parts,
            const at::Tensor& scalars) const override {
    if (parts.empty()) return;
    const OnDevice on(at::globalContext().getDeviceFromPtr(
        parts[0].range.master, c10::DeviceType::CUDA));
    Check(
        StepCuda(formula, parts.data(), static_cast<int64_t>(parts.size()),
                 scalars.defined() ? scalars.const_data_ptr<double>() : nullptr,
                 on.stream()));
  }
};

const bool kRegistered = [] {
  RegisterDeviceKernels(c10::DeviceType::CUDA, new CudaKernels());
  return true;
}();

}  // namespace
}  // namespace tessera
