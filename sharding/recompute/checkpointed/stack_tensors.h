// The tensors among an operator's arguments or results.
#ifndef SHARDING_RECOMPUTE_CHECKPOINTED_STACK_TENSORS_H_
#define SHARDING_RECOMPUTE_CHECKPOINTED_STACK_TENSORS_H_

#include <cstddef>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/ivalue.h"
#include "ATen/core/stack.h"
#include "sharding/dispatch/operator_info.h"
#include "sharding/dispatch/stack_tensors.h"

namespace tessera {

// Calls f(tensor, index) for each defined tensor among the top `n` values.
template <typename F>
void ForEachTensor(const torch::jit::Stack& stack, size_t n, F&& f) {
  ForEachTensorOf(stack, n, [&](const at::Tensor& t, size_t i) {
    if (t.defined()) f(t, i);
  });
}

// The same, and puts what f(tensor, index) returns in its place unless that is
// undefined. Lists that change are replaced, since others may have them, too.
template <typename F>
void ReplaceTensors(torch::jit::Stack* stack, size_t n, F&& f) {
  for (size_t i = 0; i < n; ++i) {
    c10::IValue& value = (*stack)[stack->size() - n + i];
    if (value.isTensor()) {
      if (!value.toTensor().defined()) continue;
      at::Tensor other = f(value.toTensor(), i);
      if (other.defined()) value = std::move(other);
    } else if (value.isList()) {
      c10::List<c10::IValue> list = value.toList();
      bool copied = false;
      for (size_t k = 0; k < list.size(); ++k) {
        const c10::IValue element = list.get(k);
        if (!element.isTensor() || !element.toTensor().defined()) continue;
        at::Tensor other = f(element.toTensor(), i);
        if (!other.defined()) continue;
        if (!std::exchange(copied, true)) list = list.copy();
        list.set(k, std::move(other));
      }
      if (copied) value = c10::IValue(std::move(list));
    }
  }
}

// Nothing is known of what it writes: all of its arguments count as written.
inline bool WritesAreGuessed(const OperatorInfo& info) {
  return !info.aten && !info.promises;
}

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_CHECKPOINTED_STACK_TENSORS_H_
