// Visits the tensors of an operator's arguments or results, in order: tensors,
// and those in lists. Undefined tensors, and `none` in lists of optional
// tensors, count.
#ifndef SHARDING_DISPATCH_STACK_TENSORS_H_
#define SHARDING_DISPATCH_STACK_TENSORS_H_

#include <algorithm>
#include <cstddef>
#include <utility>

#include "ATen/core/Tensor.h"
#include "ATen/core/ivalue.h"
#include "ATen/core/stack.h"

namespace tessera {

// Calls f(tensor, index of the value) for the tensors of the top `n` values.
template <typename F>
void ForEachTensorOf(const torch::jit::Stack& stack, size_t n, F&& f) {
  for (size_t i = 0; i < n; ++i) {
    const c10::IValue& value = stack[stack.size() - n + i];
    if (value.isTensor()) {
      f(value.toTensor(), i);
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) f(t, i);
    } else if (value.isList()) {
      for (const c10::IValue& e : value.toListRef()) {
        if (e.isTensor()) f(e.toTensor(), i);
      }
    }
  }
}

// Calls f(tensor, index of the value) for the defined tensors.
template <typename F>
void ForEachDefinedTensor(const torch::jit::Stack& stack, size_t n, F&& f) {
  ForEachTensorOf(stack, n, [&](const at::Tensor& t, size_t i) {
    if (t.defined()) f(t, i);
  });
}

// Returns `value` with each tensor replaced by f(tensor). A list of tensors
// becomes a new list, since others may hold the old one.
template <typename F>
c10::IValue WithTensors(const c10::IValue& value, F&& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(f(t));
    return list;
  }
  if (value.isList()) {
    c10::List<c10::IValue> elements = value.toList();
    auto list = c10::impl::GenericList(elements.elementType());
    for (const c10::IValue& e : value.toListRef()) {
      list.push_back(e.isTensor() ? c10::IValue(f(e.toTensor())) : e);
    }
    return list;
  }
  return value;
}

// Replaces each defined tensor of the top `n` values by f(tensor, index of the
// value), unless that is undefined. Values without tensors stay the same
// objects.
template <typename F>
void ReplaceTensors(torch::jit::Stack* stack, size_t n, F&& f) {
  for (size_t i = 0; i < n; ++i) {
    c10::IValue& value = (*stack)[stack->size() - n + i];
    const auto is_tensor = [](const c10::IValue& e) { return e.isTensor(); };
    const bool has =
        value.isTensor() ||
        (value.isList() && std::any_of(value.toListRef().begin(),
                                       value.toListRef().end(), is_tensor));
    if (!has) continue;
    value = WithTensors(value, [&](const at::Tensor& t) {
      at::Tensor other = t.defined() ? f(t, i) : at::Tensor();
      return other.defined() ? other : t;
    });
  }
}

}  // namespace tessera
#endif  // SHARDING_DISPATCH_STACK_TENSORS_H_
