#include "optim/host_step.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/empty.h"
#include "base/layout/flat_buffer.h"
#include "base/status.h"
#include "base/stream/side_stream.h"
#include "base/torch/tensor_over.h"
#include "base/trace/trace.h"
#include "c10/core/StreamGuard.h"
#include "optim/step_scalars.h"

namespace tessera {
namespace {

// A kernel leaves out the working copy of what it does not step, so it gets
// none then.
void ApplyOnHost(const UnitStep& step, Range slice, const StepTensors& all) {
  StepTensors tensors = all;
  if (!step.steps_all()) tensors.working.reset();
  UnitStep::Counts counts;
  const bool written = step.Apply(slice, tensors, &counts);
  if (all.working.defined() && !written) all.working.copy_(all.masters);
}

// Masters first.
std::vector<TieredBuffer*> OfStates(const HostStates& states) {
  std::vector<TieredBuffer*> all = {states.masters};
  all.insert(all.end(), states.moments.begin(), states.moments.end());
  return all;
}

class Update {
 public:
  Update(const UnitStep& step, const HostFactor& factor,
         const HostStates& states, at::Device device, at::Tensor on_device,
         std::shared_ptr<const EarlyHost> early)
      : step_(step),
        factor_(factor),
        states_(states),
        device_(device),
        on_device_(std::move(on_device)),
        early_(std::move(early)),
        after_(StreamPoint::Now(device)) {}

  // What is on a disk comes with each slice, in this order.
  std::vector<StreamedUpdate::State> Streamed() const {
    std::vector<StreamedUpdate::State> streamed;
    for (TieredBuffer* const state : OfStates(states_)) {
      if (state->on_disk()) streamed.push_back({state});
    }
    if (states_.working != nullptr && states_.working->on_disk()) {
      streamed.push_back({states_.working, /*read=*/false});
    }
    return streamed;
  }

  // On the update's thread, all of them. `data`: of Streamed.
  absl::Status Compute(Range slice, const std::vector<char*>& data) {
    if (slice.begin == 0) Begin();
    if (!taken_) StepSlice(slice, data);
    if (skip_ || !on_device_.defined()) return absl::OkStatus();
    const c10::StreamGuard guard(SideStream(device_));
    const TieredBuffer& from =
        states_.working == nullptr ? *states_.masters : *states_.working;
    return from.CopyTo(slice, Slice(on_device_, slice));
  }

  StreamPoint End() const {
    if (skip_ || !on_device_.defined()) return {};
    const c10::StreamGuard guard(SideStream(device_));
    return StreamPoint::Now(device_);
  }

 private:
  void Begin() {
    {
      const c10::StreamGuard guard(SideStream(device_));
      after_.Order();
    }
    const HostFactor::Value value = factor_.Wait();
    skip_ = value.skip;
    step_.SetFactor(value.factor);
    if (early_ != nullptr && early_->made && !skip_ &&
        early_->factor == value.factor) {
      return TakeEarly();
    }
    for (TieredBuffer* const state : OfStates(states_)) {
      on_host_.push_back(state->on_disk() ? at::Tensor()
                                          : state->Host().Wait());
    }
    gradient_ = states_.gradient->Host().Wait();
    if (states_.working == nullptr || states_.working->on_disk()) return;
    working_ = states_.working->Host().Wait();
  }

  // It was the right one.
  void TakeEarly() {
    taken_ = true;
    ++*early_->taken;
    for (TieredBuffer* const state : OfStates(states_)) state->Flip();
    if (states_.working != nullptr && states_.working->has_next()) {
      states_.working->Flip();
    }
  }

  void StepSlice(Range slice, const std::vector<char*>& data) const {
    StepTensors tensors;
    const std::vector<TieredBuffer*> states = OfStates(states_);
    size_t streamed = 0;
    for (size_t i = 0; i < states.size(); ++i) {
      const at::Tensor& all = on_host_[i];
      const Range in_tensor = states[i]->format().InTensor(slice);
      at::Tensor part = all.defined()
                            ? Slice(all, in_tensor)
                            : TensorOver(data[streamed++], {in_tensor.numel()},
                                         {1}, states[i]->dtype(), at::kCPU);
      if (i == 0) {
        tensors.masters = std::move(part);
      } else {
        tensors.states.push_back(std::move(part));
      }
    }
    const at::Tensor working =
        working_.defined() ? Slice(working_, slice)
        : states_.working != nullptr
            ? TensorOver(data[streamed], {slice.numel()}, {1},
                         states_.working->dtype(), at::kCPU)
            : at::Tensor();
    if (!skip_) {
      tensors.gradient = Slice(gradient_, slice);
      tensors.working = working;
      ApplyOnHost(step_, slice, tensors);
    } else if (working.defined() && !working_.defined()) {
      working.copy_(tensors.masters);  // what is on a disk is written anyway
    }
  }

  UnitStep step_;
  const HostFactor factor_;
  const HostStates states_;
  const at::Device device_;
  const at::Tensor on_device_;
  const std::shared_ptr<const EarlyHost> early_;
  const StreamPoint after_;
  bool skip_ = false;
  bool taken_ = false;               // the early step
  std::vector<at::Tensor> on_host_;  // of OfStates; undefined: on a disk
  at::Tensor gradient_, working_;
};

// All of it is as it is when this is made: a Flip may come before it begins.
class EarlyUpdate {
 public:
  EarlyUpdate(const UnitStep& step, const HostStates& states,
              std::shared_ptr<EarlyHost> early)
      : step_(step),
        gradient_(states.gradient->Host()),
        early_(std::move(early)) {
    for (TieredBuffer* const state : OfStates(states)) {
      now_.push_back(state->Host());
      next_.push_back(state->NextOnHost());
    }
    if (states.working == nullptr) return;
    working_ = states.working->has_next() ? states.working->NextOnHost()
                                          : states.working->Host();
  }

  void Compute(Range slice) const {
    if (slice.begin == 0) Wait();
    StepTensors tensors;
    for (size_t i = 0; i < now_.size(); ++i) {
      const at::Tensor next = next_[i].Part(slice).copy_(now_[i].Part(slice));
      if (i == 0) {
        tensors.masters = next;
      } else {
        tensors.states.push_back(next);
      }
    }
    tensors.gradient = gradient_.Part(slice);
    if (!step_.keeps_gradient()) tensors.gradient = tensors.gradient.clone();
    if (working_.elements.defined()) {
      tensors.working = working_.Part(slice);
    }
    ApplyOnHost(step_, slice, tensors);
    early_->made = slice.end == gradient_.elements.numel();
  }

 private:
  void Wait() const {
    for (const HostElements& each : now_) each.Wait();
    for (const HostElements& each : next_) each.Wait();
    gradient_.Wait();
    working_.Wait();
  }

  const UnitStep step_;
  const HostElements gradient_;
  const std::shared_ptr<EarlyHost> early_;
  std::vector<HostElements> now_, next_;  // of OfStates
  HostElements working_;                  // undefined: masters are it
};

}  // namespace

HostFactor::HostFactor(const GradientFactor& factor)
    : value_{factor.value, false} {
  if (!factor.scalars.defined()) return;
  const at::Tensor& scalars = factor.scalars;
  scalars_ = at::empty(scalars.sizes(),
                       scalars.options().device(at::kCPU).pinned_memory(true));
  scalars_.copy_(scalars, /*non_blocking=*/true);
  arrived_ = StreamPoint::Now(scalars.device());
}

HostFactor::Value HostFactor::Wait() const {
  if (!scalars_.defined()) return value_;
  arrived_.Wait();
  const double* const scalars = scalars_.const_data_ptr<double>();
  return {scalars[kFactor], scalars[kSkip] != 0};
}

StreamedUpdate HostStep(const UnitStep& step, const HostFactor& factor,
                        const HostStates& states, at::Device device,
                        at::Tensor on_device,
                        std::shared_ptr<const EarlyHost> early) {
  const auto update = std::make_shared<Update>(
      step, factor, states, device, std::move(on_device), std::move(early));
  StreamedUpdate streamed;
  streamed.numel = states.masters->numel();
  streamed.unit = std::string(UnitInText(states.masters->what()));
  streamed.states = update->Streamed();
  streamed.compute = [update](Range slice, const std::vector<char*>& data) {
    return update->Compute(slice, data);
  };
  streamed.end = [update] { return update->End(); };
  return streamed;
}

StreamedUpdate EarlyHostStep(const UnitStep& step, const HostStates& states,
                             std::shared_ptr<EarlyHost> early) {
  StreamedUpdate streamed;
  streamed.numel = states.masters->numel();
  streamed.unit = std::string(UnitInText(states.masters->what()));
  streamed.compute = [update = EarlyUpdate(step, states, std::move(early))](
                         Range slice, const std::vector<char*>&) {
    update.Compute(slice);
    return absl::OkStatus();
  };
  return streamed;
}

}  // namespace tessera
