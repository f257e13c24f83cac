#include "sharding/recompute/rng_state.h"

#include <algorithm>

#include "base/torch/torch_scope.h"

namespace tessera {

RngState RngState::Capture(const std::vector<at::Device>& devices) {
  TorchScope scope;
  RngState result;
  result.all_.emplace_back(DefaultGeneratorOf(at::kCPU));
  std::vector<at::Device> seen;
  for (at::Device device : devices) {
    // Only these have generators that advance by themselves.
    if (!device.is_cuda() && !device.is_xpu() && !device.is_privateuseone()) {
      continue;
    }
    if (std::find(seen.begin(), seen.end(), device) != seen.end()) continue;
    seen.push_back(device);
    result.all_.emplace_back(DefaultGeneratorOf(device));
  }
  return result;
}

RngState RngState::CaptureSame(const RngState& of) {
  TorchScope scope;
  RngState result;
  for (const GeneratorState& one : of.all_) {
    result.all_.emplace_back(one.generator());
  }
  return result;
}

bool RngState::IsCurrent() const {
  TorchScope scope;
  return std::all_of(all_.begin(), all_.end(),
                     [](const GeneratorState& one) { return one.IsCurrent(); });
}

void RngState::Set() const {
  TorchScope scope;
  for (const GeneratorState& one : all_) one.Restore();
}

}  // namespace tessera
