#include "sharding/recompute/rng_state.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Context.h"
#include "sharding/torch/torch_scope.h"

namespace tessera {
namespace {

at::Tensor StateOf(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

// `state`, or the thread's last one if that is equal.
at::Tensor Shared(at::Tensor state) {
  thread_local at::Tensor last;
  const bool equal = last.defined() && last.nbytes() == state.nbytes() &&
                     std::memcmp(last.const_data_ptr(), state.const_data_ptr(),
                                 state.nbytes()) == 0;
  if (!equal) last = std::move(state);
  return last;
}

}  // namespace

void RngState::Add(at::Generator generator) {
  at::Tensor state = StateOf(generator);
  if (generator.device().is_cpu()) state = Shared(std::move(state));
  all_.push_back({std::move(generator), std::move(state)});
}

RngState RngState::Capture(const std::vector<at::Device>& devices) {
  TorchScope scope;
  RngState result;
  result.Add(at::detail::getDefaultCPUGenerator());
  std::vector<at::Device> seen;
  for (at::Device device : devices) {
    // Only these have generators that advance by themselves.
    if (!device.is_cuda() && !device.is_xpu()) continue;
    if (std::find(seen.begin(), seen.end(), device) != seen.end()) continue;
    seen.push_back(device);
    result.Add(at::globalContext().defaultGenerator(device));
  }
  return result;
}

RngState RngState::CaptureSame(const RngState& of) {
  TorchScope scope;
  RngState result;
  for (const One& one : of.all_) {
    result.all_.push_back({one.generator, StateOf(one.generator)});
  }
  return result;
}

void RngState::Set() const {
  TorchScope scope;
  for (const One& one : all_) {
    at::Generator generator = one.generator;
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(one.state);
  }
}

}  // namespace tessera
