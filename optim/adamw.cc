#include "optim/adamw.h"

#include <utility>

#include "absl/strings/str_cat.h"
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
        MemoryKind::kOptimizer,
        options.states_on_disk ? options.stream->disk() : nullptr,
        absl::StrCat(state, " of unit ", flat.name()));
  };
  TESSERA_ASSIGN_OR_RETURN(states_[u].exp_avg, allocate("exp_avg"));
  TESSERA_ASSIGN_OR_RETURN(states_[u].exp_avg_sq, allocate("exp_avg_sq"));
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
    UnitStep::Counts counts;
    counted_.clear();
    for (size_t u = 0; u < flats_.size(); ++u) {
      const FlatGradient& gradient = gradients->of(u);
      if (!gradient.has_step_gradient()) continue;
      CountStep(*flats_[u], gradient);
      states_[u].written = true;
      const UnitStep step(*flats_[u], gradient, steps_, options_, factor);
      if (flats_[u]->options().stream != nullptr) {
        const CommFuture updated = StartOnDisk(u, step, gradients);
        TESSERA_RETURN_IF_ERROR(after(u, /*working_written=*/true, updated));
        continue;
      }
      const StepTensors tensors = {
          flats_[u]->masters(), states_[u].exp_avg.View(),
          states_[u].exp_avg_sq.View(), gradient.owned(),
          flats_[u]->separate_working()};
      const bool working_written =
          step.Apply({0, flats_[u]->owned().numel()}, tensors, &counts);
      if (after) TESSERA_RETURN_IF_ERROR(after(u, working_written, {}));
    }
    return absl::OkStatus();
  });
}

// The unit's gradient goes with it: the next step's is another.
CommFuture AdamW::StartOnDisk(size_t u, const UnitStep& step,
                              Gradients* gradients) {
  FlatParameter& flat = *flats_[u];
  StreamedStep streamed(step);
  using Place = StreamedStep::Place;
  FlatGradient::Taken gradient = gradients->TakeStepGradient(u);
  if (gradient.on_disk != nullptr) {
    streamed.Add(Place::kGradient, gradient.on_disk);
  } else {
    streamed.SetGradient(std::move(gradient.memory));
  }
  streamed.Add(Place::kExpAvg, &states_[u].exp_avg);
  streamed.Add(Place::kExpAvgSq, &states_[u].exp_avg_sq);
  if (TieredBuffer* const masters = flat.masters_buffer()) {
    streamed.Add(Place::kMasters, masters);
  } else {
    streamed.SetMemory(Place::kMasters, flat.masters());
  }
  TieredBuffer* const working = flat.separate_working_on_disk();
  if (working != nullptr) {
    streamed.Add(Place::kWorking, working);
  } else {
    streamed.SetMemory(Place::kWorking, flat.separate_working());
  }
  const UpdateStream::Pushed pushed =
      flat.options().stream->Push(std::move(streamed).Update());
  return flat.options().parameters_on_disk ? pushed.written : pushed.computed;
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
    if (flats_[u]->options().stream != nullptr) {
      stream = flats_[u]->options().stream.get();
    }
  }
  return stream == nullptr ? bytes : bytes + stream->resident_bytes();
}

}  // namespace tessera
