#include "optim/adamw.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "offload/update_stream.h"
#include "optim/streamed_step.h"
#include "sharding/torch/torch_scope.h"

namespace tessera {

absl::StatusOr<std::unique_ptr<AdamW>> AdamW::Create(
    std::vector<std::shared_ptr<FlatParameter>> flats, AdamWOptions options) {
  auto adamw = std::make_unique<AdamW>();
  adamw->options_ = options;
  adamw->configured_rate_ = options.lr;
  adamw->flats_ = std::move(flats);
  adamw->states_.resize(adamw->flats_.size());
  for (size_t u = 0; u < adamw->flats_.size(); ++u) {
    const FlatParameter& flat = *adamw->flats_[u];
    if (flat.trainable()) TESSERA_RETURN_IF_ERROR(adamw->EnsureState(u));
    adamw->steps_.resize(adamw->steps_.size() + flat.parameters().size());
  }
  return adamw;
}

absl::Status AdamW::EnsureState(size_t u) {
  FlatParameter& flat = *flats_[u];
  if (states_[u].exp_avg_sq.defined()) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(flat.MakeMasters());
  const FlatParameterOptions& options = flat.options();
  const auto allocate = [&](const char* state) {
    return TieredBuffer::Allocate(
        flat.owned().numel(), flat.master_dtype(), flat.device(),
        MemoryKind::kOptimizer, options.PlaceOf(options.states),
        absl::StrCat(state, " of unit ", flat.name()));
  };
  State made;  // all of it, or nothing
  TESSERA_ASSIGN_OR_RETURN(made.exp_avg, allocate("exp_avg"));
  TESSERA_ASSIGN_OR_RETURN(made.exp_avg_sq, allocate("exp_avg_sq"));
  if (flat.updated_on_host()) {
    TESSERA_RETURN_IF_ERROR(AllocateHostBuffers(flat, &made));
  }
  states_[u] = std::move(made);
  return absl::OkStatus();
}

absl::Status AdamW::AllocateHostBuffers(const FlatParameter& flat,
                                        State* state) {
  const auto allocate = [&](at::ScalarType dtype, MemoryKind kind,
                            const char* what) {
    return TieredBuffer::Allocate(flat.owned().numel(), dtype, flat.device(),
                                  kind, {Tier::kHost, nullptr},
                                  absl::StrCat(what, " of unit ", flat.name()));
  };
  if (!flat.stage().sharded_gradients) {
    TESSERA_ASSIGN_OR_RETURN(
        state->gradient,
        allocate(flat.master_dtype(), MemoryKind::kGradients, "gradient"));
  }
  const bool masters_are_it = flat.dtype() == flat.master_dtype() &&
                              flat.options().states == Tier::kHost;
  if (!masters_are_it && flat.options().parameters == Tier::kMemory) {
    TESSERA_ASSIGN_OR_RETURN(
        state->working,
        allocate(flat.dtype(), MemoryKind::kOptimizer, "new values"));
  }
  return absl::OkStatus();
}

std::vector<uint8_t> AdamW::has_state() const {
  std::vector<uint8_t> has;
  for (const State& state : states_) has.push_back(state.exp_avg_sq.defined());
  return has;
}

absl::Status AdamW::MatchStates(const std::vector<uint8_t>& has_state) {
  for (size_t u = 0; u < flats_.size(); ++u) {
    if (has_state[u] != 0) {
      TESSERA_RETURN_IF_ERROR(EnsureState(u));
    } else {
      states_[u] = State();
      flats_[u]->DropMasters();
    }
  }
  return absl::OkStatus();
}

absl::Status AdamW::Prepare(const Gradients& gradients) {
  for (size_t u = 0; u < flats_.size(); ++u) {
    if (!gradients.of(u).has_step_gradient()) continue;
    TESSERA_RETURN_IF_ERROR(EnsureState(u));
  }
  return absl::OkStatus();
}

absl::Status AdamW::Step(Gradients* gradients, const GradientFactor& factor,
                         const AfterUnit& after) {
  return CatchTorch("optimizer step", [&]() -> absl::Status {
    TorchScope scope;
    std::vector<Awaited> awaited;
    counted_.clear();
    half_stepped_ = false;
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
absl::Status AdamW::StepUnits(Gradients* gradients,
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
    if (!gradient.has_step_gradient()) continue;
    const UnitStep step(flat, gradient.has_gradient(), steps_, options_,
                        factor);
    CountStep(flat, gradient);
    states_[u].written = true;
    CommFuture updated;
    bool working_written = true;
    if (flat.updated_on_host()) {
      if (!on_host.has_value()) on_host.emplace(factor);
      TESSERA_ASSIGN_OR_RETURN(updated,
                               StartOnHost(u, step, *on_host, gradients));
    } else if (flat.options().stream != nullptr && flat.device().is_cpu()) {
      updated = StartOnDisk(u, step, gradients);
    } else {
      TESSERA_ASSIGN_OR_RETURN(working_written,
                               StepHere(u, step, gradient, &counts));
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
  return absl::OkStatus();
}

// What lies elsewhere, its shard or what Engine::Offload has taken there, is
// back for the moment of its step.
absl::StatusOr<bool> AdamW::StepHere(size_t u, const UnitStep& step,
                                     const FlatGradient& gradient,
                                     UnitStep::Counts* counts) {
  FlatParameter& flat = *flats_[u];
  TESSERA_ASSIGN_OR_RETURN(Raised masters, Raised::Of(flat.masters_buffer()));
  TESSERA_ASSIGN_OR_RETURN(Raised working,
                           Raised::Of(flat.separate_working_elsewhere()));
  TESSERA_ASSIGN_OR_RETURN(Raised exp_avg, Raised::Of(&states_[u].exp_avg));
  TESSERA_ASSIGN_OR_RETURN(Raised exp_avg_sq,
                           Raised::Of(&states_[u].exp_avg_sq));
  const StepTensors tensors = {flat.masters(), states_[u].exp_avg.View(),
                               states_[u].exp_avg_sq.View(), gradient.owned(),
                               flat.separate_working()};
  half_stepped_ = true;  // and not only when all of it is back where it lies
  const bool working_written =
      step.Apply({0, flat.owned().numel()}, tensors, counts);
  TESSERA_RETURN_IF_ERROR(exp_avg.Commit());
  TESSERA_RETURN_IF_ERROR(exp_avg_sq.Commit());
  TESSERA_RETURN_IF_ERROR(masters.Commit());
  if (working_written) TESSERA_RETURN_IF_ERROR(working.Commit());
  return working_written;
}

HostStates AdamW::HostStatesOf(size_t u) {
  FlatParameter& flat = *flats_[u];
  State& state = states_[u];
  // A shard on the host is the new values' place itself.
  TieredBuffer* const shard = flat.separate_working_elsewhere();
  HostStates states = {flat.masters_buffer(), &state.exp_avg,
                       &state.exp_avg_sq};
  states.working = shard != nullptr          ? shard
                   : state.working.defined() ? &state.working
                                             : nullptr;
  return states;
}

absl::StatusOr<TieredBuffer*> AdamW::GradientOnHost(size_t u,
                                                    FlatGradient* gradient) {
  if (gradient->elsewhere() != nullptr) return gradient->elsewhere();
  TieredBuffer& copy = states_[u].gradient;
  TESSERA_CHECK(copy.defined()) << flats_[u]->name();
  TESSERA_RETURN_IF_ERROR(copy.CopyFrom({0, copy.numel()}, gradient->coming()));
  return &copy;
}

absl::StatusOr<CommFuture> AdamW::StartOnHost(size_t u, const UnitStep& step,
                                              const HostFactor& factor,
                                              Gradients* gradients) {
  FlatParameter& flat = *flats_[u];
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

StreamedStep AdamW::Streamed(size_t u, const UnitStep& step, bool early) {
  FlatParameter& flat = *flats_[u];
  StreamedStep streamed(step, early);
  using Place = StreamedStep::Place;
  streamed.Add(Place::kExpAvg, &states_[u].exp_avg);
  streamed.Add(Place::kExpAvgSq, &states_[u].exp_avg_sq);
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

// The unit's gradient goes with it: the next step's is another.
CommFuture AdamW::StartOnDisk(size_t u, const UnitStep& step,
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
CommFuture AdamW::UpdatedOf(FlatParameter* flat,
                            const UpdateStream::Pushed& pushed) {
  const TieredBuffer* const shard = flat->shard_buffer();
  const bool gathered_from_disk = shard != nullptr && shard->on_disk();
  return gathered_from_disk ? pushed.written : pushed.computed;
}

void AdamW::CountStep(const FlatParameter& flat, const FlatGradient& gradient) {
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    if (!gradient.has_gradient(i)) continue;
    counted_.push_back(static_cast<size_t>(flat.parameters()[i].index));
    ++steps_[counted_.back()];
  }
}

void AdamW::Uncount() {
  for (const size_t i : counted_) --steps_[i];
  counted_.clear();
}

int64_t AdamW::resident_bytes() const {
  int64_t bytes = 0;
  const UpdateStream* stream = nullptr;
  for (size_t u = 0; u < states_.size(); ++u) {
    bytes += states_[u].exp_avg.resident_bytes() * 2;
    if (states_[u].next != nullptr) bytes += states_[u].next->bytes();
    if (flats_[u]->options().stream != nullptr &&
        flats_[u]->device().is_cpu()) {
      stream = flats_[u]->options().stream.get();
    }
  }
  return stream == nullptr ? bytes : bytes + stream->resident_bytes();
}

}  // namespace tessera
