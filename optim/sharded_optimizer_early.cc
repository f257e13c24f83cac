// Steps that are made before they are asked for.
//
// Why: a disk that works only from Step on, and into the next forward, is idle
// while a backward computes, and a step takes the sum of both. A unit's
// gradient is final when it has been reduced, if the step goes as steps mostly
// go: one backward, nothing clipped, no overflow, every expected parameter.
// What else would be (clipping by a norm of gradients that are still to come)
// is known at Step alone. So the step is made as if it were known, where it can
// be dropped: what was there stays, on the disk and in memory, and Step looks
// whether what it has decided is what was assumed.
//
// Of units on a device whose states are on the host Step does not know either:
// the device decides, and tells the update stream's thread, behind the early
// step (HostStep).
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "optim/sharded_optimizer.h"

namespace tessera {
namespace {

bool MastersOnDisk(FlatParameter* flat) {
  const TieredBuffer* const masters = flat->masters_buffer();
  return masters != nullptr && masters->on_disk();
}

// What a step writes to memory: masters, or the working copy where they are on
// the disk; undefined where that is there, too.
at::Tensor WrittenInMemory(FlatParameter* flat) {
  if (!MastersOnDisk(flat)) return flat->masters();
  return flat->separate_working_elsewhere() == nullptr
             ? flat->separate_working()
             : at::Tensor();
}

}  // namespace

bool ShardedOptimizer::EarlyOnDisk(size_t u) const {
  FlatParameter& flat = *flats_[u];
  if (IsDirection(FormulaOf(u)) || is_custom()) return false;
  const std::vector<TieredBuffer>& moments = states_[u].moments;
  const auto on_disk = [](const TieredBuffer& b) { return b.on_disk(); };
  return flat.device().is_cpu() && flat.options().states == Tier::kDisk &&
         std::all_of(moments.begin(), moments.end(), on_disk) &&
         (!moments.empty() || MastersOnDisk(&flat));
}

// All that it writes is on the host: what is on a disk would have to be kept or
// dropped by what the device decides, while it goes through the slices.
bool ShardedOptimizer::EarlyOnHost(size_t u) const {
  FlatParameter& flat = *flats_[u];
  const std::vector<TieredBuffer>& moments = states_[u].moments;
  if (is_custom() || !flat.updated_on_host() || !states_[u].made ||
      !std::all_of(moments.begin(), moments.end(),
                   [](const TieredBuffer& b) { return b.on_host(); })) {
    return false;
  }
  const TieredBuffer* const shard = flat.separate_working_elsewhere();
  return flat.masters_buffer()->on_host() &&
         (shard == nullptr || shard->on_host());
}

bool ShardedOptimizer::MayStepEarly() const {
  for (size_t u = 0; u < flats_.size(); ++u) {
    if (EarlyOnDisk(u) || EarlyOnHost(u)) return true;
  }
  return false;
}

std::vector<TieredBuffer*> ShardedOptimizer::WrittenBuffers(size_t u) {
  FlatParameter& flat = *flats_[u];
  std::vector<TieredBuffer*> written;
  for (TieredBuffer& state : states_[u].moments) written.push_back(&state);
  for (TieredBuffer* const buffer :
       {flat.masters_buffer(), flat.separate_working_elsewhere()}) {
    if (buffer != nullptr) written.push_back(buffer);
  }
  return written;
}

// Of memory that early steps write, with that of the unit `with`.
int64_t ShardedOptimizer::NextBytes(size_t with) {
  int64_t bytes = 0;
  for (size_t u = 0; u < states_.size(); ++u) {
    for (const TieredBuffer* const buffer : WrittenBuffers(u)) {
      if (!buffer->on_host()) continue;
      if (u == with || buffer->has_next()) bytes += buffer->bytes();
    }
    if (u == with && EarlyOnDisk(u)) {
      const at::Tensor now = WrittenInMemory(flats_[u].get());
      bytes += now.defined() ? static_cast<int64_t>(now.nbytes()) : 0;
    } else if (states_[u].next != nullptr) {
      bytes += states_[u].next->bytes();
    }
  }
  return bytes;
}

// Of all that the unit's step writes. ResourceExhausted, beyond early_bytes_,
// too; Unavailable while an early step that was dropped still writes there.
absl::Status ShardedOptimizer::MakeRoomForNext(size_t u) {
  const at::Tensor now =
      EarlyOnDisk(u) ? WrittenInMemory(flats_[u].get()) : at::Tensor();
  std::shared_ptr<FlatBuffer>& next = states_[u].next;
  // Engine::Offload and Reload change what is in memory.
  if (next != nullptr &&
      (!now.defined() || next->dtype() != now.scalar_type())) {
    next = nullptr;
  }
  if (next != nullptr && next.use_count() > 1) {
    return absl::UnavailableError("is written");
  }
  if (NextBytes(u) > early_bytes_) {
    return absl::ResourceExhaustedError("early_bytes");
  }
  for (TieredBuffer* const buffer : WrittenBuffers(u)) {
    if (!buffer->elsewhere()) continue;
    const absl::Status made = buffer->MakeRoomForNext();
    if (made.ok()) continue;
    for (TieredBuffer* const other : WrittenBuffers(u)) {
      other->DropNext();
    }
    return made;
  }
  if (!now.defined() || next != nullptr) return absl::OkStatus();
  // Zeros, for what lies between parameters: a kernel leaves that out.
  TESSERA_ASSIGN_OR_RETURN(
      FlatBuffer memory,
      FlatBuffer::Allocate(now.numel(), now.scalar_type(), now.device(),
                           MemoryKind::kOptimizer, Fill::kZero));
  next = std::make_shared<FlatBuffer>(std::move(memory));
  return absl::OkStatus();
}

ShardedOptimizer::EarlyStep ShardedOptimizer::PushEarlyOnDisk(
    size_t u, const UnitStep& step, FlatGradient* gradient) {
  FlatParameter& flat = *flats_[u];
  StreamedStep streamed = Streamed(u, step, /*early=*/true);
  if (TieredBuffer* const elsewhere = gradient->elsewhere()) {
    streamed.Add(StreamedStep::kGradient, elsewhere);
  } else {
    streamed.SetMemory(StreamedStep::kGradient, gradient->owned());
  }
  if (states_[u].next != nullptr) {
    streamed.SetNext(
        MastersOnDisk(&flat) ? StreamedStep::kWorking : StreamedStep::kMasters,
        states_[u].next);
  }
  early_order_.push_back(u);
  return {step, flat.options().stream->PushEarly(std::move(streamed).Update()),
          nullptr};
}

absl::StatusOr<ShardedOptimizer::EarlyStep> ShardedOptimizer::PushEarlyOnHost(
    size_t u, const UnitStep& step, FlatGradient* gradient) {
  HostStates states = HostStatesOf(u);
  TESSERA_ASSIGN_OR_RETURN(states.gradient, GradientOnHost(u, gradient));
  auto early = std::make_shared<EarlyHost>();
  early->factor = step.factor();
  early->taken = &early_units_;
  return EarlyStep{step,
                   flats_[u]->options().stream->PushEarly(
                       EarlyHostStep(step, states, early)),
                   early};
}

void ShardedOptimizer::StartEarly(size_t u, FlatGradient* gradient,
                                  const std::vector<OptimizerOptions>& options,
                                  double factor) {
  if (states_[u].early.has_value()) return;
  const bool on_host = EarlyOnHost(u);
  if (!on_host && !EarlyOnDisk(u)) return;
  // What is refused is made by Step, which says what is wrong.
  (void)CatchTorch("early step", [&]() -> absl::Status {
    TorchScope scope;
    FlatParameter& flat = *flats_[u];
    TESSERA_RETURN_IF_ERROR(flat.options().stream->DrainKept());
    TESSERA_RETURN_IF_ERROR(MakeRoomForNext(u));
    const UnitStep step(flat, gradient->expected(), steps_, WithShares(options),
                        groups_.of, factor);
    if (on_host) {
      TESSERA_ASSIGN_OR_RETURN(states_[u].early,
                               PushEarlyOnHost(u, step, gradient));
    } else {
      states_[u].early = PushEarlyOnDisk(u, step, gradient);
    }
    return absl::OkStatus();
  });
}

void ShardedOptimizer::DropEarly() {
  early_order_.clear();
  for (size_t u = 0; u < states_.size(); ++u) {
    if (!states_[u].early.has_value()) continue;
    (void)flats_[u]->options().stream->Drain();  // an error is the next Step's
    states_[u].early.reset();
  }
}

// Step goes through the units as a forward uses them: what has not begun would
// be in the way of a disk. A device is behind its host: there it is in the
// order in which the gradients are still to come.
void ShardedOptimizer::DropQueuedEarly() {
  for (size_t u = 0; u < states_.size(); ++u) {
    if (!states_[u].early.has_value() || !EarlyOnDisk(u)) continue;
    return flats_[u]->options().stream->DropQueued();
  }
}

// The next backward's gradients come in the same order, most likely. Where
// parameters are on the disk it has no idle time: gathers come first there.
void ShardedOptimizer::Foresee() {
  UpdateStream* stream = nullptr;
  std::vector<std::vector<TieredBuffer*>> units;
  for (const size_t u : early_order_) {
    FlatParameter& flat = *flats_[u];
    const TieredBuffer* const shard = flat.shard_buffer();
    if (shard != nullptr && shard->on_disk()) return;
    stream = flat.options().stream.get();
    std::vector<TieredBuffer*>& states = units.emplace_back();
    for (TieredBuffer* const state : WrittenBuffers(u)) {
      if (state->on_disk()) states.push_back(state);
    }
  }
  if (stream != nullptr) stream->Foresee(units);
}

// What it has written to memory goes to its place behind it.
std::optional<CommFuture> ShardedOptimizer::KeepEarly(size_t u,
                                                      const UnitStep& step,
                                                      Gradients* gradients) {
  std::optional<EarlyStep> early =
      std::exchange(states_[u].early, std::nullopt);
  if (!early.has_value()) return std::nullopt;
  FlatParameter& flat = *flats_[u];
  UpdateStream& stream = *flat.options().stream;
  if (!(early->step == step)) {
    stream.Drop(early->update);
    return std::nullopt;
  }
  const auto gradient = std::make_shared<FlatGradient::Taken>();
  const std::optional<UpdateStream::Pushed> kept =
      stream.Keep(early->update, gradient);
  if (!kept.has_value()) return std::nullopt;
  *gradient = gradients->TakeStepGradient(u);
  ++early_units_;
  if (states_[u].next == nullptr) return UpdatedOf(&flat, *kept);
  const at::Tensor to = WrittenInMemory(&flat);
  StreamedUpdate copy;
  copy.numel = to.numel();
  copy.compute = [from = states_[u].next, to](Range slice,
                                              const std::vector<char*>&) {
    ElementsOver(to, slice.begin, slice.numel()).copy_(from->View(slice));
    return absl::OkStatus();
  };
  return UpdatedOf(&flat, stream.Push(std::move(copy)));
}

std::shared_ptr<const EarlyHost> ShardedOptimizer::KeepEarlyOnHost(
    size_t u, const UnitStep& step) {
  const std::optional<EarlyStep> early =
      std::exchange(states_[u].early, std::nullopt);
  if (!early.has_value()) return nullptr;
  UpdateStream& stream = *flats_[u]->options().stream;
  if (early->step.SameButFactor(step)) {
    const bool kept = stream.Keep(early->update, nullptr).has_value();
    return kept ? early->on_host : nullptr;
  }
  stream.Drop(early->update);
  // It may be reading what Step copies anew.
  if (states_[u].gradient.defined()) (void)stream.DrainKept();
  return nullptr;
}

}  // namespace tessera
