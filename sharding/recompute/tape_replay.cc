#include <utility>

#include "absl/strings/str_cat.h"
#include "base/trace/trace.h"
#include "sharding/dispatch/operator_watch.h"
#include "sharding/dispatch/stack_tensors.h"
#include "sharding/flat/pins.h"
#include "sharding/recompute/replay_scope.h"
#include "sharding/recompute/tape.h"

namespace tessera {

void Tape::Run(const Operator& op, std::vector<c10::Storage>* storages) const {
  const auto memory = [&](int index) -> c10::Storage& {
    return (*storages)[static_cast<size_t>(index)];
  };
  PinSet pins;
  if (op.fills) {
    const Use& use = op.uses[0];
    memory(use.memory) = CopyOf(use.outside->copy());
    return;
  }
  const std::string& operator_name = op.handle->schema().name();
  const std::string reader = absl::StrCat(name_, ", ", operator_name);
  size_t next = 0;
  const auto value = [&](const at::Tensor&) -> at::Tensor {
    const Use& use = op.uses[next++];
    if (use.memory >= 0) return use.place.Over(memory(use.memory));
    if (use.outside == nullptr) return at::Tensor();
    const at::Tensor outside =
        use.outside->Value(use.placed ? &use.place : nullptr, reader, &pins);
    return use.written && use.placed ? use.place.Over(CopyOf(outside.storage()))
                                     : outside;
  };
  torch::jit::Stack stack;
  for (const c10::IValue& argument : op.arguments) {
    stack.push_back(WithTensors(argument, value));
  }
  if (op.drawn_from.has_value() && op.generator < 0) {
    op.drawn_from->Restore();
  } else if (op.drawn_from.has_value()) {
    stack[static_cast<size_t>(op.generator)] = op.drawn_from->Clone();
  }
  op.handle->callBoxed(&stack);
  size_t position = 0;
  auto result = op.results.begin();
  ForEachTensorOf(stack, stack.size(), [&](const at::Tensor& t, size_t) {
    const size_t here = position++;
    if (result == op.results.end() || result->position != here) return;
    TORCH_CHECK(t.defined() && result->place.SameAs(TensorPlace(t)), "[", name_,
                "] operator ", operator_name,
                " gave a tensor of other sizes when its activations were "
                "recomputed: ",
                t.sizes(), " instead of ", at::IntArrayRef(result->place.sizes),
                "; leave the module out of activation_checkpointing.units");
    memory(result->memory) = t.storage();
    ++result;
  });
}

std::vector<c10::Storage> Tape::Replay(const Made& made) const {
  const TraceScope trace(TraceTrack::kMain, "compute again", name_);
  ReplayScope scope;
  // Restores the default generators that the replay sets, for operators that
  // take no generator. All other operators draw from a generator of their own,
  // so a thread that draws from the default one meanwhile is not disturbed.
  GeneratorScope generators;
  std::vector<c10::Storage> storages(memories_.size());
  for (size_t m = 0; m < memories_.size(); ++m) {
    const Memory& memory = memories_[m];
    if (memory.outside == nullptr) continue;
    PinSet none;
    storages[m] =
        memory.outside->Value(&memory.held_place, name_, &none).storage();
  }
  for (size_t i = 0; i < operators_.size(); ++i) {
    const auto& drawn_from = operators_[i].drawn_from;
    if (drawn_from.has_value() && operators_[i].generator < 0) {
      generators.Keep(drawn_from->generator());
    }
    Run(operators_[i], &storages);
    for (const Result& result : operators_[i].results) {
      const auto m = static_cast<size_t>(result.memory);
      if (made != nullptr && memories_[m].writers == 1) {
        made(result.memory, &storages[m]);
      }
    }
    for (const int memory : last_used_[i]) {
      storages[static_cast<size_t>(memory)] = c10::Storage();
    }
  }
  std::vector<c10::Storage> wanted;
  wanted.reserve(wanted_.size());
  for (const int memory : wanted_) {
    wanted.push_back(storages[static_cast<size_t>(memory)]);
  }
  return wanted;
}

}  // namespace tessera
