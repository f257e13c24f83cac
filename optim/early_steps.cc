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
// For units on a device with states on the host, Step does not know that
// either: the device decides, and the update stream's thread learns it after
// the early step (StepSlices).
#include "optim/early_steps.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/status.h"
#include "base/torch/tensor_over.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "base/trace/trace.h"
#include "offload/shard_states.h"

namespace tessera {
namespace {

// What a step writes to memory: masters, or the working shard where they are on
// the disk; undefined where that is there, too.
at::Tensor WrittenInMemory(const FlatParameter& flat) {
  ShardStates& states = flat.states();
  TieredBuffer* const written =
      states.value().on_disk() ? states.separate_working() : &states.value();
  return written != nullptr && written->in_memory() ? written->View()
                                                    : at::Tensor();
}

bool AnyOnDisk(const FlatParameter& flat, const FlatGradient& gradient) {
  if (flat.options().stream == nullptr || !flat.device().is_cpu()) return false;
  if (gradient.elsewhere() != nullptr) return true;
  const std::vector<TieredBuffer*> written = flat.states().Written();
  return std::any_of(written.begin(), written.end(),
                     [](const TieredBuffer* b) { return b->on_disk(); });
}

// Starts to copy the gradient of a unit on a device to the states' kGradient.
// ASYNC. Errors are TierRoom's.
absl::Status BringGradient(FlatParameter* flat, FlatGradient* gradient) {
  if (gradient->elsewhere() != nullptr) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(flat->states().Ensure(
      ShardStates::kGradient, gradient->coming().scalar_type(),
      {Tier::kHost, nullptr}));
  return gradient->StartCopyTo(&flat->states().At(ShardStates::kGradient));
}

}  // namespace

bool EarlySteps::MayStartOnDisk(size_t u) const {
  const FlatParameter& flat = *flats_[u];
  const OptimizerOptions& options = states_.OptionsOf(u);
  if (IsDirection(FormulaOf(options)) || options.custom != nullptr ||
      !states_.made(u)) {
    return false;
  }
  const std::vector<TieredBuffer>& moments = flat.states().moments();
  const auto on_disk = [](const TieredBuffer& b) { return b.on_disk(); };
  return flat.device().is_cpu() && flat.options().states_tier == Tier::kDisk &&
         std::all_of(moments.begin(), moments.end(), on_disk) &&
         (!moments.empty() || on_disk(flat.states().value()));
}

// All that it writes is on the host: what is on a disk would have to be kept or
// dropped by what the device decides, while it goes through the slices.
bool EarlySteps::MayStartOnHost(size_t u) const {
  const FlatParameter& flat = *flats_[u];
  if (states_.OptionsOf(u).custom != nullptr || !flat.updated_on_host() ||
      !states_.made(u)) {
    return false;
  }
  const std::vector<TieredBuffer*> written = flat.states().Written();
  const TieredBuffer* const shard = flat.states().separate_working();
  return std::all_of(written.begin(), written.end(), [&](TieredBuffer* b) {
    return b->on_host() || (b == shard && !b->elsewhere());
  });
}

bool EarlySteps::MayStart() const {
  for (size_t u = 0; u < flats_.size(); ++u) {
    if (MayStartOnDisk(u) || MayStartOnHost(u)) return true;
  }
  return false;
}

// Returns the bytes of memory that early steps write, including the unit
// `with`.
int64_t EarlySteps::NextBytes(size_t with) const {
  int64_t bytes = 0;
  for (size_t u = 0; u < units_.size(); ++u) {
    for (const TieredBuffer* const buffer : flats_[u]->states().Written()) {
      if (!buffer->on_host()) continue;
      if (u == with || buffer->next().defined()) bytes += buffer->bytes();
    }
    if (u == with && MayStartOnDisk(u)) {
      const at::Tensor now = WrittenInMemory(*flats_[u]);
      bytes += now.defined() ? static_cast<int64_t>(now.nbytes()) : 0;
    } else if (units_[u].next != nullptr) {
      bytes += units_[u].next->bytes();
    }
  }
  return bytes;
}

// Makes room for all that the unit's step writes. ResourceExhausted, also
// beyond bytes_; Unavailable while a dropped early step still writes there.
absl::Status EarlySteps::MakeRoom(size_t u) {
  const at::Tensor now =
      MayStartOnDisk(u) ? WrittenInMemory(*flats_[u]) : at::Tensor();
  std::shared_ptr<FlatBuffer>& next = units_[u].next;
  // Engine::Offload and Reload change what is in memory.
  if (next != nullptr &&
      (!now.defined() || next->dtype() != now.scalar_type())) {
    next = nullptr;
  }
  if (next != nullptr && next.use_count() > 1) {
    return absl::UnavailableError("is written");
  }
  if (NextBytes(u) > bytes_) return absl::ResourceExhaustedError("early_bytes");
  TESSERA_RETURN_IF_ERROR(flats_[u]->states().MakeRoomForNext());
  if (!now.defined() || next != nullptr) return absl::OkStatus();
  // Zeros, for what lies between parameters: a kernel leaves that out.
  TESSERA_ASSIGN_OR_RETURN(
      FlatBuffer memory,
      FlatBuffer::Allocate(now.numel(), now.scalar_type(), now.device(),
                           MemoryKind::kOptimizer, Fill::kZero));
  next = std::make_shared<FlatBuffer>(std::move(memory));
  return absl::OkStatus();
}

absl::StatusOr<EarlySteps::Pushed> EarlySteps::Push(size_t u,
                                                    const UnitStep& step,
                                                    FlatGradient* gradient) {
  FlatParameter& flat = *flats_[u];
  SliceStepOptions options;
  options.early = true;
  if (flat.updated_on_host()) {
    TESSERA_RETURN_IF_ERROR(BringGradient(&flat, gradient));
    options.host = std::make_shared<EarlyHost>();
    options.host->factor = step.factor();
    options.host->taken = &taken_;
  } else {
    if (gradient->elsewhere() == nullptr) options.gradient = gradient->owned();
    options.next = units_[u].next;
    order_.push_back(u);
  }
  const std::shared_ptr<EarlyHost> on_host = options.host;
  return Pushed{step,
                flat.options().stream->PushEarly(
                    StepSlices(&flat, step, std::move(options))),
                on_host};
}

void EarlySteps::Start(size_t u, FlatGradient* gradient,
                       const std::vector<OptimizerOptions>& options,
                       double factor) {
  if (units_[u].pushed.has_value()) return;
  if (!MayStartOnHost(u) && !MayStartOnDisk(u)) return;
  // What is refused is made by Step, which says what is wrong.
  (void)CatchTorch("early step", [&]() -> absl::Status {
    TorchScope scope;
    FlatParameter& flat = *flats_[u];
    TESSERA_RETURN_IF_ERROR(flat.options().stream->DrainKept());
    TESSERA_RETURN_IF_ERROR(MakeRoom(u));
    const UnitStep step(flat, gradient->expected(), counts_.steps(),
                        counts_.WithShares(options), groups_.of, factor);
    TESSERA_ASSIGN_OR_RETURN(units_[u].pushed, Push(u, step, gradient));
    return absl::OkStatus();
  });
}

void EarlySteps::Drop() {
  order_.clear();
  for (size_t u = 0; u < units_.size(); ++u) {
    if (units_[u].pushed.has_value()) {
      // An error is the next Step's.
      (void)flats_[u]->options().stream->Drain();
      units_[u].pushed.reset();
    }
    // A load may have dropped its states.
    if (!MayStartOnDisk(u)) units_[u].next = nullptr;
  }
}

int64_t EarlySteps::resident_bytes() const {
  int64_t bytes = 0;
  for (const Unit& unit : units_) {
    if (unit.next != nullptr) bytes += unit.next->bytes();
  }
  return bytes;
}

// Step goes through the units as a forward uses them: what has not begun would
// be in the way of a disk. A device is behind its host: there it is in the
// order in which the gradients are still to come.
void EarlySteps::BeginStep() {
  taken_before_ = taken_;
  factor_.reset();
  for (size_t u = 0; u < units_.size(); ++u) {
    if (!units_[u].pushed.has_value() || !MayStartOnDisk(u)) continue;
    return flats_[u]->options().stream->DropQueued();
  }
}

void EarlySteps::EndStep() {
  factor_.reset();
  if (taken_ > taken_before_) Prefetch();
  Drop();
}

// The next backward's gradients come in the same order, most likely. Where
// parameters are on the disk it has no idle time: gathers come first there.
void EarlySteps::Prefetch() {
  UpdateStream* stream = nullptr;
  std::vector<std::vector<TieredBuffer*>> units;
  for (const size_t u : order_) {
    FlatParameter& flat = *flats_[u];
    if (flat.states().At(ShardStates::kWorking).on_disk()) return;
    stream = flat.options().stream.get();
    std::vector<TieredBuffer*>& states = units.emplace_back();
    for (TieredBuffer* const state : flat.states().Written()) {
      if (state->on_disk()) states.push_back(state);
    }
  }
  if (stream != nullptr) stream->Prefetch(units);
}

absl::StatusOr<std::optional<CommFuture>> EarlySteps::Step(
    size_t u, const UnitStep& step, const GradientFactor& factor,
    Gradients* gradients) {
  FlatParameter& flat = *flats_[u];
  UpdateStream::Pushed pushed;
  if (flat.updated_on_host()) {
    if (!factor_.has_value()) factor_.emplace(factor);
    TESSERA_ASSIGN_OR_RETURN(pushed, StepOnHost(u, step, gradients));
  } else if (AnyOnDisk(flat, gradients->of(u))) {
    pushed = StepOnDisk(u, step, gradients);
  } else {
    return std::nullopt;
  }
  // A gather from the disk takes what is not there yet from the stream
  // (UpdateStream::StartFetch), and learns the result of the rest.
  return flat.states().At(ShardStates::kWorking).on_disk() ? pushed.written
                                                           : pushed.computed;
}

// A shard on the host is the new values' place itself.
absl::StatusOr<UpdateStream::Pushed> EarlySteps::StepOnHost(
    size_t u, const UnitStep& step, Gradients* gradients) {
  FlatParameter& flat = *flats_[u];
  const TraceScope trace(TraceTrack::kStep, "start update on the host",
                         flat.name());
  SliceStepOptions options;
  options.factor = factor_;
  options.host = KeepOnHost(u, step);
  if (options.host == nullptr) {  // else it has been brought
    TESSERA_RETURN_IF_ERROR(BringGradient(&flat, &gradients->of(u)));
  }
  if (flat.stage().sharded_gradients) (void)gradients->of(u).TakeStepGradient();
  TieredBuffer* const shard = flat.states().separate_working();
  if (shard != nullptr && !shard->elsewhere()) {
    flat.states().Order();
    options.on_device = shard->View();
  }
  return flat.options().stream->Push(
      StepSlices(&flat, step, std::move(options)));
}

// The unit's gradient goes with it: the next step's is another.
UpdateStream::Pushed EarlySteps::StepOnDisk(size_t u, const UnitStep& step,
                                            Gradients* gradients) {
  FlatParameter& flat = *flats_[u];
  if (const auto kept = Keep(u, step, gradients)) return *kept;
  SliceStepOptions options;
  options.gradient_memory =
      std::make_shared<const FlatBuffer>(gradients->of(u).TakeStepGradient());
  options.gradient = options.gradient_memory->View();
  return flat.options().stream->Push(
      StepSlices(&flat, step, std::move(options)));
}

// What it has written to memory goes to its place behind it.
std::optional<UpdateStream::Pushed> EarlySteps::Keep(size_t u,
                                                     const UnitStep& step,
                                                     Gradients* gradients) {
  std::optional<Pushed> early = std::exchange(units_[u].pushed, std::nullopt);
  if (!early.has_value()) return std::nullopt;
  FlatParameter& flat = *flats_[u];
  UpdateStream& stream = *flat.options().stream;
  if (!(early->step == step)) {
    stream.Drop(early->update);
    return std::nullopt;
  }
  const auto gradient = std::make_shared<FlatBuffer>();
  const std::optional<UpdateStream::Pushed> kept =
      stream.Keep(early->update, gradient);
  if (!kept.has_value()) return std::nullopt;
  *gradient = gradients->of(u).TakeStepGradient();
  ++taken_;
  if (units_[u].next == nullptr) return kept;
  const at::Tensor to = WrittenInMemory(flat);
  StreamedUpdate copy;
  copy.numel = to.numel();
  copy.compute = [from = units_[u].next, to](Range slice,
                                             const std::vector<char*>&) {
    ElementsOver(to, slice.begin, slice.numel()).copy_(from->View(slice));
    return absl::OkStatus();
  };
  return stream.Push(std::move(copy));
}

std::shared_ptr<EarlyHost> EarlySteps::KeepOnHost(size_t u,
                                                  const UnitStep& step) {
  const std::optional<Pushed> early =
      std::exchange(units_[u].pushed, std::nullopt);
  if (!early.has_value()) return nullptr;
  FlatParameter& flat = *flats_[u];
  UpdateStream& stream = *flat.options().stream;
  if (early->step.SameButFactor(step)) {
    const bool kept = stream.Keep(early->update, nullptr).has_value();
    return kept ? early->on_host : nullptr;
  }
  stream.Drop(early->update);
  // It may be reading what Step copies anew.
  if (!flat.stage().sharded_gradients) (void)stream.DrainKept();
  return nullptr;
}

}  // namespace tessera
