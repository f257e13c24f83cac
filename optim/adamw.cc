#include "optim/adamw.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/tensor_over.h"
#include "base/torch_guard.h"
#include "offload/update_stream.h"
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
  const auto& stream = flat.options().states_stream;
  const auto allocate = [&](const char* state) {
    return TieredBuffer::Allocate(
        flat.owned().numel(), flat.master_dtype(), flat.device(),
        MemoryKind::kOptimizer, stream == nullptr ? nullptr : stream->disk(),
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
    if (!gradients.of(u).owned().defined()) continue;
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
      if (!gradient.owned().defined()) continue;
      CountStep(*flats_[u], gradient);
      states_[u].written = true;
      const UnitStep step(*flats_[u], gradient, steps_, options_, factor);
      if (states_[u].exp_avg.on_disk()) {
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

// The unit's gradient goes with it: the next step's is another. Masters are on
// the disk too, or where the working copy is.
CommFuture AdamW::StartOnDisk(size_t u, const UnitStep& step,
                              Gradients* gradients) {
  FlatParameter& flat = *flats_[u];
  TieredBuffer* const masters = flat.separate_masters();
  StreamedUpdate update;
  update.states = {&states_[u].exp_avg, &states_[u].exp_avg_sq};
  StepTensors all;
  if (masters == nullptr) {
    all.masters = flat.masters();
  } else {
    update.states.push_back(masters);
    all.working = flat.separate_working();
  }
  auto gradient =
      std::make_shared<const FlatBuffer>(gradients->TakeStepGradient(u));
  update.compute = [step, all, gradient, dtype = flat.master_dtype()](
                       Range slice, const std::vector<char*>& data) {
    const auto over = [&](char* at) {
      return TensorOver(at, {slice.numel()}, {1}, dtype, at::kCPU);
    };
    const auto part = [&](const at::Tensor& of) {
      return of.defined() ? ElementsOver(of, slice.begin, slice.numel()) : of;
    };
    const StepTensors tensors = {
        all.masters.defined() ? part(all.masters) : over(data[2]),
        over(data[0]), over(data[1]), part(gradient->View()),
        part(all.working)};
    UnitStep::Counts counts;
    const bool working_written = step.Apply(slice, tensors, &counts);
    if (tensors.working.defined() && !working_written) {
      tensors.working.copy_(tensors.masters);
    }
    return absl::OkStatus();
  };
  return flat.options().states_stream->Push(std::move(update));
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
    if (states_[u].exp_avg.on_disk()) {
      stream = flats_[u]->options().states_stream.get();
    }
  }
  return stream == nullptr ? bytes : bytes + stream->resident_bytes();
}

}  // namespace tessera
