#include "optim/device_kernels.h"

#include <array>

#include "base/torch/step_arithmetic.h"

namespace tessera {
namespace {

using Table =
    std::array<const DeviceKernels*, c10::COMPILE_TIME_MAX_DEVICE_TYPES>;

Table& Kernels() {
  static Table table = {};
  return table;
}

}  // namespace

const DeviceKernels* DeviceKernelsOf(c10::DeviceType type) {
  return Kernels()[static_cast<size_t>(type)];
}

void RegisterDeviceKernels(c10::DeviceType type, const DeviceKernels* kernels) {
  Kernels()[static_cast<size_t>(type)] = kernels;
  SetHasStepKernels(type, kernels != nullptr);
}

}  // namespace tessera
