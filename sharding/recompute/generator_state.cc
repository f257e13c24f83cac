#include "sharding/recompute/generator_state.h"

#include <algorithm>
#include <mutex>

#include "ATen/Context.h"
#include "ATen/ops/equal.h"
#include "absl/status/status.h"
#include "base/log.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"

namespace tessera {
namespace {

bool Same(const at::mt19937& a, const at::mt19937& b) {
  const at::mt19937_data_pod x = a.data(), y = b.data();
  return x.seed_ == y.seed_ && x.left_ == y.left_ && x.seeded_ == y.seeded_ &&
         x.next_ == y.next_ && x.state_ == y.state_;
}

}  // namespace

at::Generator DefaultGeneratorOf(at::Device device) {
  if (device.is_cpu()) return at::detail::getDefaultCPUGenerator();
  if (device.is_meta()) return at::Generator();  // draws nothing
  return at::globalContext().defaultGenerator(device);
}

GeneratorState::GeneratorState(const at::Generator& generator)
    : generator_(generator) {
  std::lock_guard<std::mutex> lock(generator_.mutex());
  if (!generator_.device().is_cpu()) {
    TorchScope scope;
    state_ = generator_.get_state();
    return;
  }
  auto* const cpu = generator_.get<at::CPUGeneratorImpl>();
  engine_ = cpu->engine();
  next_float_ = cpu->next_float_normal_sample();
  next_double_ = cpu->next_double_normal_sample();
}

bool GeneratorState::IsCurrent() const {
  const GeneratorState now(generator_);
  if (!engine_.has_value()) {
    TorchScope scope;
    return at::equal(state_, now.state_);
  }
  return Same(*engine_, *now.engine_) && next_float_ == now.next_float_ &&
         next_double_ == now.next_double_;
}

void GeneratorState::Restore() const { SetTo(generator_); }

at::Generator GeneratorState::Clone() const {
  at::Generator original = generator_, clone;
  {
    std::lock_guard<std::mutex> lock(original.mutex());
    clone = original.clone();
  }
  SetTo(clone);
  return clone;
}

void GeneratorState::SetTo(at::Generator generator) const {
  std::lock_guard<std::mutex> lock(generator.mutex());
  if (!engine_.has_value()) {
    TorchScope scope;
    generator.set_state(state_);
    return;
  }
  auto* const cpu = generator.get<at::CPUGeneratorImpl>();
  cpu->set_engine(*engine_);
  cpu->set_next_float_normal_sample(next_float_);
  cpu->set_next_double_normal_sample(next_double_);
}

GeneratorStates GeneratorStates::OfDefaults(
    const std::vector<at::Device>& devices) {
  GeneratorStates states;
  states.all_.emplace_back(DefaultGeneratorOf(at::kCPU));
  std::vector<at::Device> seen;
  for (at::Device device : devices) {
    // Only these have generators that advance by themselves.
    if (!device.is_cuda() && !device.is_xpu() && !device.is_privateuseone()) {
      continue;
    }
    if (std::find(seen.begin(), seen.end(), device) != seen.end()) continue;
    seen.push_back(device);
    states.all_.emplace_back(DefaultGeneratorOf(device));
  }
  return states;
}

bool GeneratorStates::AreCurrent() const {
  return std::all_of(all_.begin(), all_.end(),
                     [](const GeneratorState& one) { return one.IsCurrent(); });
}

void GeneratorStates::Restore() const {
  for (const GeneratorState& one : all_) one.Restore();
}

GeneratorScope::GeneratorScope(const GeneratorStates& states) {
  for (const GeneratorState& one : states.all_) Keep(one.generator());
  states.Restore();
}

void GeneratorScope::Keep(const at::Generator& generator) {
  for (const GeneratorState& state : before_) {
    if (state.generator() == generator) return;
  }
  before_.emplace_back(generator);
}

GeneratorScope::~GeneratorScope() {
  for (const GeneratorState& state : before_) {
    const absl::Status status =
        CatchTorch("generator", [&] { state.Restore(); });
    if (!status.ok()) TESSERA_LOG(ERROR) << status.message();
  }
}

}  // namespace tessera
