#include "optim/factored/factored_states.h"

#include "base/status.h"
#include "optim/kernels/shaped_states.h"

namespace tessera {

absl::StatusOr<FactoredStates> FactoredStates::Allocate(
    const FlatParameter& flat, Formula formula) {
  FactoredStates states;
  if (!HasShapedStates(formula)) return states;
  const int64_t numel = ShapedNumelOf(formula, flat.parameters());
  TESSERA_ASSIGN_OR_RETURN(
      states.buffer_,
      FlatBuffer::Allocate(numel, flat.step_dtype(), flat.update_device(),
                           MemoryKind::kOptimizer));
  int64_t begin = 0;
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    const auto sizes = flat.parameters()[i].tensor.sizes();
    for (const StateShape& shape : ShapedStatesOf(formula, sizes)) {
      const int64_t end = begin + shape.numel();
      states.all_.push_back(
          {i, shape.name, states.buffer_.View({begin, end}).view(shape.sizes)});
      begin = end;
    }
  }
  return states;
}

at::Tensor FactoredStates::Find(size_t parameter,
                                absl::string_view name) const {
  for (const ShapedState& state : all_) {
    if (state.parameter == parameter && state.name == name) return state.values;
  }
  return at::Tensor();
}

}  // namespace tessera
