#include "optim/streamed_step.h"

#include <algorithm>
#include <utility>

#include "base/torch/tensor_over.h"

namespace tessera {

StreamedStep::StreamedStep(const UnitStep& step, bool early)
    : parts_{step, early, nullptr, 0, {}, {}, {}, {}} {
  parts_.streamed.fill(-1);
}

// All of a working copy is written, from the masters.
void StreamedStep::Add(Place place, TieredBuffer* buffer) {
  if (!buffer->on_disk()) {
    SetMemory(place, buffer->View());
    parts_.formats[place] = buffer->format();
    return;
  }
  CountState(place);
  parts_.streamed[place] = static_cast<int>(update_.states.size());
  parts_.formats[place] = buffer->format();
  update_.numel = buffer->numel();
  update_.states.push_back({buffer, /*read=*/place != kWorking,
                            /*written=*/place != kGradient});
}

void StreamedStep::SetGradient(FlatBuffer gradient) {
  parts_.gradient = std::make_shared<const FlatBuffer>(std::move(gradient));
  parts_.memory[kGradient] = parts_.gradient->View();
}

void StreamedStep::CountState(Place place) {
  parts_.states = std::max(parts_.states, place + 1 - kStates);
}

void StreamedStep::SetMemory(Place place, at::Tensor elements) {
  CountState(place);
  parts_.memory[place] = std::move(elements);
}

void StreamedStep::SetNext(Place place,
                           std::shared_ptr<const FlatBuffer> elements) {
  parts_.next[place] = std::move(elements);
}

// A kernel would leave out the working copy of what it does not step.
absl::Status StreamedStep::Parts::Apply(Range slice,
                                        const std::vector<char*>& data) const {
  const auto part = [&](Place place) -> at::Tensor {
    const ElementFormat& format = formats[place];
    const Range part = format.InTensor(slice);
    if (streamed[place] >= 0) {
      return TensorOver(data[static_cast<size_t>(streamed[place])],
                        {part.numel()}, {1}, format.dtype, at::kCPU);
    }
    const at::Tensor& all = memory[place];
    return all.defined() ? ElementsOver(all, part.begin, part.numel()) : all;
  };
  const auto next_of = [&](Place place) {
    return ElementsOver(next[place]->View(), slice.begin, slice.numel());
  };
  const auto changed = [&](Place place) {
    const at::Tensor now = part(place);
    return next[place] == nullptr ? now : next_of(place).copy_(now);
  };
  at::Tensor gradient = part(kGradient);
  if (early && streamed[kGradient] < 0 && !step.keeps_gradient()) {
    gradient = gradient.clone();
  }
  const bool working_in_memory = memory[kWorking].defined();
  const at::Tensor working = changed(kWorking);
  const bool apart = next[kMasters] != nullptr && step.writes_elsewhere();
  StepTensors tensors;
  tensors.masters = apart ? part(kMasters) : changed(kMasters);
  for (int s = 0; s < states; ++s) {
    tensors.states.push_back(part(StatePlace(static_cast<size_t>(s))));
  }
  tensors.gradient = gradient;
  if (working_in_memory) tensors.working = working;
  if (apart) tensors.new_masters = next_of(kMasters);
  UnitStep::Counts counts;
  const bool working_written = step.Apply(slice, tensors, &counts);
  if (working.defined() && !(working_in_memory && working_written)) {
    working.copy_(apart ? tensors.new_masters : tensors.masters);
  }
  return absl::OkStatus();
}

StreamedUpdate StreamedStep::Update() && {
  update_.compute = [parts = std::move(parts_)](
                        Range slice, const std::vector<char*>& data) {
    return parts.Apply(slice, data);
  };
  return std::move(update_);
}

}  // namespace tessera
