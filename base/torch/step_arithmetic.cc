#include "base/torch/step_arithmetic.h"

#include <array>

namespace tessera {
namespace {

using Table = std::array<bool, c10::COMPILE_TIME_MAX_DEVICE_TYPES>;

Table& HasKernels() {
  static Table table = {};
  return table;
}

}  // namespace

bool StepsByFormula(c10::DeviceType device, at::ScalarType masters,
                    bool plain_adamw) {
  if (plain_adamw && masters != at::kFloat) return false;
  return device == c10::DeviceType::CPU ||
         HasKernels()[static_cast<size_t>(device)];
}

void SetHasStepKernels(c10::DeviceType device, bool has) {
  HasKernels()[static_cast<size_t>(device)] = has;
}

}  // namespace tessera
