#include "optim/sharded_optimizer.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "base/trace/trace.h"
#include "offload/update_stream.h"
#include "optim/custom/custom_optimizer.h"
#include "optim/device_kernels.h"
#include "optim/streamed_step.h"

namespace tessera {

absl::StatusOr<std::unique_ptr<ShardedOptimizer>> ShardedOptimizer::Create(
    std::vector<std::shared_ptr<FlatParameter>> flats, ParameterGroups groups) {
  auto made = std::make_unique<ShardedOptimizer>();
  made->groups_ = std::move(groups);
  made->flats_ = std::move(flats);
  made->states_.resize(made->flats_.size());
  for (const auto& flat : made->flats_) {
    made->steps_.resize(made->steps_.size() + flat->parameters().size());
  }
  made->groups_.of.resize(made->steps_.size());
  made->SetAverageWeights(
      std::vector<AverageWeights>(made->groups_.options.size()));
  for (size_t u = 0; u < made->flats_.size(); ++u) {
    TESSERA_RETURN_IF_ERROR(made->CheckKernels(u));
    if (!made->flats_[u]->trainable()) continue;
    TESSERA_RETURN_IF_ERROR(made->EnsureState(u));
  }
  return made;
}

// Operators do a program's own, libtorch's kernels plain AdamW of one dtype on
// any device.
absl::Status ShardedOptimizer::CheckKernels(size_t u) const {
  const FlatParameter& flat = *flats_[u];
  const at::Device device = flat.update_device();
  if (IsDirection(FormulaOf(u))) TESSERA_RETURN_IF_ERROR(CheckDirected(u));
  const bool plain = IsPlainAdamW(groups_.options) &&
                     OptionsOf(u).states == StateType::kFloat32 &&
                     flat.master_dtype() == flat.step_dtype();
  if (device.is_cpu() || plain || is_custom() ||
      DeviceKernelsOf(device.type()) != nullptr) {
    return absl::OkStatus();
  }
  return absl::UnimplementedError(
      absl::StrCat("optimizer: there are no kernels for it on ", device.str(),
                   "; use AdamW, or offload the optimizer to the CPU"));
}

const OptimizerOptions& ShardedOptimizer::OptionsOf(size_t u) const {
  const auto first = static_cast<size_t>(flats_[u]->parameters()[0].index);
  return groups_.options[static_cast<size_t>(groups_.of[first])];
}

std::string ShardedOptimizer::name() const {
  std::set<std::string> names;
  for (size_t u = 0; u < flats_.size(); ++u)
    names.insert(OptimizerNameOf(OptionsOf(u)));
  return absl::StrJoin(names, "+");
}

absl::Status ShardedOptimizer::Prepare(const Gradients& gradients) {
  half_stepped_ = false;
  for (size_t u = 0; u < flats_.size(); ++u) {
    if (!gradients.of(u).has_step_gradient()) continue;
    TESSERA_RETURN_IF_ERROR(EnsureState(u));
  }
  return absl::OkStatus();
}

absl::Status ShardedOptimizer::Step(Gradients* gradients,
                                    const GradientFactor& factor,
                                    const AfterUnit& after) {
  return CatchTorch("optimizer step", [&]() -> absl::Status {
    TorchScope scope;
    std::vector<Awaited> awaited;
    counted_.clear();
    weights_before_ = weights_;
    groups_.options = WithShares(std::move(groups_.options));
    absl::Status status = StepUnits(gradients, factor, after, &awaited);
    // All of them, whatever becomes of some: the device writes to their memory.
    for (const Awaited& each : awaited) status.Update(each.updated.Wait());
    for (const Awaited& each : awaited) {
      TESSERA_RETURN_IF_ERROR(status);
      status = after(each.flat, /*working_written=*/true, {});
    }
    if (!status.ok() && !half_stepped_) Uncount();
    if (status.ok()) half_stepped_ = false;
    return status;
  });
}

// What is always whole on a device is awaited: its all-gather follows, in the
// same order on all ranks.
absl::Status ShardedOptimizer::StepUnits(Gradients* gradients,
                                         const GradientFactor& factor,
                                         const AfterUnit& after,
                                         std::vector<Awaited>* awaited) {
  UnitStep::Counts counts;
  std::optional<HostFactor> on_host;
  const int64_t early_units = early_units_;
  DropQueuedEarly();
  for (size_t u = 0; u < flats_.size(); ++u) {
    const FlatParameter& flat = *flats_[u];
    const FlatGradient& gradient = gradients->of(u);
    if (!gradient.has_step_gradient() || IsDirection(FormulaOf(u))) continue;
    const UnitStep step(flat, gradient.has_gradient(), steps_, groups_.options,
                        groups_.of, factor);
    CountStep(flat, gradient);
    states_[u].written = true;
    CommFuture updated;
    bool working_written = true;
    if (flat.updated_on_host()) {
      if (!on_host.has_value()) on_host.emplace(factor);
      TESSERA_ASSIGN_OR_RETURN(updated,
                               StartOnHost(u, step, *on_host, gradients));
    } else if (AnyOnDisk(u, &gradients->of(u))) {
      updated = StartOnDisk(u, step, gradients);
    } else {
      TESSERA_ASSIGN_OR_RETURN(working_written,
                               StepHere(u, step, gradient.owned(), &counts));
    }
    half_stepped_ = true;
    if (flat.updated_on_host() && !flat.can_be_freed()) {
      awaited->push_back({u, updated});
    } else if (after) {
      TESSERA_RETURN_IF_ERROR(after(u, working_written, updated));
    }
  }
  if (early_units_ > early_units) Foresee();
  early_order_.clear();
  return StepDirected(gradients, factor, after);
}

// What lies elsewhere, its shard or what Engine::Offload has taken there, is
// back for the moment of its step.
absl::StatusOr<bool> ShardedOptimizer::StepHere(size_t u, const UnitStep& step,
                                                const at::Tensor& gradient,
                                                UnitStep::Counts* counts) {
  FlatParameter& flat = *flats_[u];
  const TraceScope trace(TraceTrack::kStep, "update", flat.name());
  TESSERA_ASSIGN_OR_RETURN(Raised masters, Raised::Of(flat.masters_buffer()));
  const bool directs = step.phase() == StepPhase::kDirection;
  TESSERA_ASSIGN_OR_RETURN(
      Raised working,
      Raised::Of(directs ? nullptr : flat.separate_working_elsewhere()));
  StepTensors tensors;
  std::vector<Raised> moments;
  for (TieredBuffer& state : states_[u].moments) {
    // Of a descent only the average.
    const bool averages = &state == average(u);
    if (directs && averages) continue;
    if (step.phase() == StepPhase::kDescent && !averages) continue;
    TESSERA_ASSIGN_OR_RETURN(Raised raised, Raised::Of(&state));
    moments.push_back(std::move(raised));
    tensors.states.push_back(state.View());
  }
  tensors.masters = flat.masters();
  tensors.gradient = gradient;
  if (directs) {
    tensors.new_masters = gradient;
  } else {
    tensors.working = flat.separate_working();
  }
  half_stepped_ = true;  // and not only when all of it is back where it lies
  const bool working_written =
      step.Apply({0, flat.owned().numel()}, tensors, counts);
  for (Raised& state : moments) TESSERA_RETURN_IF_ERROR(state.Commit());
  if (directs) return false;
  TESSERA_RETURN_IF_ERROR(masters.Commit());
  if (working_written) TESSERA_RETURN_IF_ERROR(working.Commit());
  return working_written;
}

HostStates ShardedOptimizer::HostStatesOf(size_t u) {
  FlatParameter& flat = *flats_[u];
  State& state = states_[u];
  // A shard on the host is the new values' place itself.
  TieredBuffer* const shard = flat.separate_working_elsewhere();
  HostStates states;
  states.masters = flat.masters_buffer();
  for (TieredBuffer& moment : state.moments) states.moments.push_back(&moment);
  states.working = shard != nullptr          ? shard
                   : state.working.defined() ? &state.working
                                             : nullptr;
  return states;
}

absl::StatusOr<TieredBuffer*> ShardedOptimizer::GradientOnHost(
    size_t u, FlatGradient* gradient) {
  if (gradient->elsewhere() != nullptr) return gradient->elsewhere();
  TieredBuffer& copy = states_[u].gradient;
  TESSERA_CHECK(copy.defined()) << flats_[u]->name();
  TESSERA_RETURN_IF_ERROR(copy.CopyFrom({0, copy.numel()}, gradient->coming()));
  return &copy;
}

absl::StatusOr<CommFuture> ShardedOptimizer::StartOnHost(
    size_t u, const UnitStep& step, const HostFactor& factor,
    Gradients* gradients) {
  FlatParameter& flat = *flats_[u];
  const TraceScope trace(TraceTrack::kStep, "start update on the host",
                         flat.name());
  HostStates states = HostStatesOf(u);
  const std::shared_ptr<const EarlyHost> early = KeepEarlyOnHost(u, step);
  if (early != nullptr && !flat.stage().sharded_gradients) {
    states.gradient = &states_[u].gradient;  // has been copied
  } else {
    TESSERA_ASSIGN_OR_RETURN(states.gradient,
                             GradientOnHost(u, &gradients->of(u)));
  }
  if (flat.stage().sharded_gradients) (void)gradients->TakeStepGradient(u);
  const at::Tensor on_device = flat.separate_working_elsewhere() != nullptr
                                   ? at::Tensor()
                                   : flat.separate_working();
  return UpdatedOf(&flat,
                   flat.options().stream->Push(HostStep(
                       step, factor, states, flat.device(), on_device, early)));
}

StreamedStep ShardedOptimizer::Streamed(size_t u, const UnitStep& step,
                                        bool early) {
  FlatParameter& flat = *flats_[u];
  StreamedStep streamed(step, early);
  using Place = StreamedStep::Place;
  for (size_t s = 0; s < states_[u].moments.size(); ++s) {
    streamed.Add(StreamedStep::StatePlace(s), &states_[u].moments[s]);
  }
  if (TieredBuffer* const masters = flat.masters_buffer()) {
    streamed.Add(Place::kMasters, masters);
  } else {
    streamed.SetMemory(Place::kMasters, flat.masters());
  }
  TieredBuffer* const working = flat.separate_working_elsewhere();
  if (working != nullptr) {
    streamed.Add(Place::kWorking, working);
  } else {
    streamed.SetMemory(Place::kWorking, flat.separate_working());
  }
  return streamed;
}

bool ShardedOptimizer::AnyOnDisk(size_t u, FlatGradient* gradient) {
  if (flats_[u]->options().stream == nullptr || !flats_[u]->device().is_cpu()) {
    return false;
  }
  if (gradient->elsewhere() != nullptr) return true;
  const std::vector<TieredBuffer*> written = WrittenBuffers(u);
  return std::any_of(written.begin(), written.end(),
                     [](const TieredBuffer* b) { return b->on_disk(); });
}

// The unit's gradient goes with it: the next step's is another.
CommFuture ShardedOptimizer::StartOnDisk(size_t u, const UnitStep& step,
                                         Gradients* gradients) {
  FlatParameter& flat = *flats_[u];
  if (const auto kept = KeepEarly(u, step, gradients)) return *kept;
  StreamedStep streamed = Streamed(u, step, /*early=*/false);
  FlatGradient::Taken gradient = gradients->TakeStepGradient(u);
  if (gradient.elsewhere != nullptr) {
    streamed.Add(StreamedStep::kGradient, gradient.elsewhere);
  } else {
    streamed.SetGradient(std::move(gradient.memory));
  }
  return UpdatedOf(&flat,
                   flat.options().stream->Push(std::move(streamed).Update()));
}

// Who gathers from the disk takes what is not there yet from the stream
// (UpdateStream::StartFetch), and is told what became of the rest.
CommFuture ShardedOptimizer::UpdatedOf(FlatParameter* flat,
                                       const UpdateStream::Pushed& pushed) {
  const TieredBuffer* const shard = flat->shard_buffer();
  const bool gathered_from_disk = shard != nullptr && shard->on_disk();
  return gathered_from_disk ? pushed.written : pushed.computed;
}

int64_t ShardedOptimizer::resident_bytes() const {
  int64_t bytes = 0;
  const UpdateStream* stream = nullptr;
  for (size_t u = 0; u < states_.size(); ++u) {
    bytes += states_[u].factored.bytes();
    for (const TieredBuffer& state : states_[u].moments) {
      bytes += state.resident_bytes();
    }
    if (states_[u].next != nullptr) bytes += states_[u].next->bytes();
    if (flats_[u]->options().stream != nullptr &&
        flats_[u]->device().is_cpu()) {
      stream = flats_[u]->options().stream.get();
    }
  }
  return stream == nullptr ? bytes : bytes + stream->resident_bytes();
}

}  // namespace tessera
