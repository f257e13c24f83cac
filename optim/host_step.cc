#include "optim/host_step.h"

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "ATen/ops/empty.h"
#include "base/status.h"
#include "base/torch/side_stream.h"
#include "base/torch/tensor_over.h"
#include "c10/core/StreamGuard.h"
#include "optim/step_scalars.h"
#include "sharding/layout/flat_buffer.h"

namespace tessera {
namespace {

class Update {
 public:
  Update(const UnitStep& step, const HostFactor& factor,
         const HostStates& states, at::Device device, at::Tensor on_device)
      : step_(step),
        factor_(factor),
        states_(states),
        device_(device),
        on_device_(std::move(on_device)),
        after_(StreamPoint::Now(device)) {}

  // What is on a disk comes with each slice, in this order.
  std::vector<StreamedUpdate::State> Streamed() const {
    std::vector<StreamedUpdate::State> streamed;
    for (TieredBuffer* const state : OfStates()) {
      if (state->on_disk()) streamed.push_back({state});
    }
    if (states_.working != nullptr && states_.working->on_disk()) {
      streamed.push_back({states_.working, /*read=*/false});
    }
    return streamed;
  }

  // On the update's thread, all of them. `data`: of Streamed.
  absl::Status Compute(Range slice, const std::vector<char*>& data) {
    if (slice.begin == 0) TESSERA_RETURN_IF_ERROR(Begin());
    std::vector<at::Tensor> states;
    size_t streamed = 0;
    for (const at::Tensor& all : on_host_) {
      states.push_back(all.defined()
                           ? Slice(all, slice)
                           : TensorOver(data[streamed++], {slice.numel()}, {1},
                                        states_.masters->dtype(), at::kCPU));
    }
    const at::Tensor working =
        working_.defined() ? Slice(working_, slice)
        : states_.working != nullptr
            ? TensorOver(data[streamed], {slice.numel()}, {1},
                         states_.working->dtype(), at::kCPU)
            : at::Tensor();
    // What is on a disk is written in any case.
    if (skip_) {
      if (working.defined() && !working_.defined()) working.copy_(states[0]);
      return absl::OkStatus();
    }
    const StepTensors tensors = {states[0], states[1], states[2],
                                 Slice(gradient_, slice),
                                 step_.steps_all() ? working : at::Tensor()};
    UnitStep::Counts counts;
    const bool written = step_.Apply(slice, tensors, &counts);
    // A kernel leaves out the working copy of what it does not step, so it got
    // none then.
    if (working.defined() && !written) {
      working.copy_(tensors.masters);
    }
    if (!on_device_.defined()) return absl::OkStatus();
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
  std::array<TieredBuffer*, 3> OfStates() const {
    return {states_.masters, states_.exp_avg, states_.exp_avg_sq};
  }

  absl::Status Begin() {
    {
      const c10::StreamGuard guard(SideStream(device_));
      after_.Order();
    }
    const HostFactor::Value value = factor_.Wait();
    skip_ = value.skip;
    step_.SetFactor(value.factor);
    for (TieredBuffer* const state : OfStates()) {
      on_host_.emplace_back();
      if (state->on_disk()) continue;
      TESSERA_ASSIGN_OR_RETURN(on_host_.back(), state->OnHost());
    }
    TESSERA_ASSIGN_OR_RETURN(gradient_, states_.gradient->OnHost());
    if (states_.working == nullptr || states_.working->on_disk()) {
      return absl::OkStatus();
    }
    TESSERA_ASSIGN_OR_RETURN(working_, states_.working->OnHost());
    return absl::OkStatus();
  }

  UnitStep step_;
  const HostFactor factor_;
  const HostStates states_;
  const at::Device device_;
  const at::Tensor on_device_;
  const StreamPoint after_;
  bool skip_ = false;
  std::vector<at::Tensor> on_host_;  // of OfStates; undefined: on a disk
  at::Tensor gradient_, working_;
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
                        at::Tensor on_device) {
  const auto update = std::make_shared<Update>(step, factor, states, device,
                                               std::move(on_device));
  StreamedUpdate streamed;
  streamed.numel = states.masters->numel();
  streamed.states = update->Streamed();
  streamed.compute = [update](Range slice, const std::vector<char*>& data) {
    return update->Compute(slice, data);
  };
  streamed.end = [update] { return update->End(); };
  return streamed;
}

}  // namespace tessera
