// Rules: how an operator of placed tensors is computed from their parts.
#ifndef PARALLEL_TENSOR_RULES_H_
#define PARALLEL_TENSOR_RULES_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"
#include "parallel/tensor/placed.h"

namespace tessera {

// How a tensor is divided; none: it is not.
inline std::optional<TensorPlacement> ShardOf(const at::Tensor& tensor) {
  const Placed* const placed = PlacedOf(tensor);
  if (placed == nullptr || placed->placement.kind != TensorPlacement::kShard) {
    return std::nullopt;
  }
  return placed->placement;
}
// Along which dimension a tensor is divided, in one group; none: it is not, so
// rules that know of no groups have wholes used.
inline std::optional<int64_t> DividedDim(const at::Tensor& tensor) {
  const std::optional<TensorPlacement> shard = ShardOf(tensor);
  if (!shard.has_value() || shard->groups != 1) return std::nullopt;
  return shard->dim;
}

// Returns `value` with f(tensor) for each tensor.
template <typename F>
c10::IValue WithTensorsOf(const c10::IValue& value, const F& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> all = value.toTensorVector();
    for (at::Tensor& each : all) each = f(each);
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const std::optional<at::Tensor>& each :
         value.toOptionalTensorVector()) {
      all.push_back(each.has_value() ? std::optional<at::Tensor>(f(*each))
                                     : std::nullopt);
    }
    return all;
  }
  return value;
}

// A call of an operator with a placed tensor among its arguments, which are the
// last ones of a stack.
class PlacedCall {
 public:
  PlacedCall(const c10::OperatorHandle& op, torch::jit::Stack* stack);

  const c10::OperatorHandle& op() const { return op_; }
  const std::shared_ptr<PartGroup>& group() const { return group_; }
  int64_t ranks() const { return group_->size(); }

  size_t size() const { return stack_.size() - begin_; }
  c10::IValue& operator[](size_t i) { return stack_[begin_ + i]; }
  // An undefined tensor for None.
  at::Tensor tensor(size_t i) const;
  const Placed* placed(size_t i) const { return PlacedOf(tensor(i)); }
  std::optional<TensorPlacement> Shard(size_t i = 0) const {
    return ShardOf(tensor(i));
  }
  // Along which dimension argument i is divided, in one group; none: it is not.
  std::optional<int64_t> Divided(size_t i = 0) const {
    return DividedDim(tensor(i));
  }
  // The dimension, not negative, that argument i names of a tensor of `dims`.
  int64_t Dim(size_t i, int64_t dims) const;

  // Runs the operator on what the arguments are now.
  void Run() { op_.callBoxed(&stack_); }
  // Runs it; its one result is a part of that placement.
  bool RunAs(TensorPlacement placement);
  // Ends the call with this result. Returns true.
  bool Return(at::Tensor result);
  bool Return(at::Tensor part, TensorPlacement placement) {
    return Return(Made(std::move(part), placement));
  }
  bool ReturnList(std::vector<at::Tensor> results);
  // Returns a placed result, which may be a view of argument 0.
  at::Tensor Made(at::Tensor part, TensorPlacement placement) const;

 private:
  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  size_t begin_;
  std::shared_ptr<PartGroup> group_;
  at::Tensor first_;  // argument 0, if it is placed
};

// Computes the call, or returns false, with the arguments as they were, if it
// has no way for these placements: then wholes are used.
using PlacedRule = bool (*)(PlacedCall& call);

// What is no index of `size` elements is an error, on a device of a later call.
void CheckRange(const at::Tensor& indices, int64_t size, const char* what);

// Computes a call whose placed tensors are copies, or that writes one.
bool CopyRule(PlacedCall& call);

// Returns null if there is none.
PlacedRule FindRule(const c10::OperatorHandle& op);

// ---- by files: {name, rule} ----
struct NamedRule {
  // "aten::view", for all overloads; "aten::sum.dim_IntList"; "aten::mm." for
  // the one without a name.
  const char* name;
  PlacedRule rule;
};
std::vector<NamedRule> ProductRules();
std::vector<NamedRule> ViewRules();
std::vector<NamedRule> LayerRules();
std::vector<NamedRule> AttentionRules();
std::vector<NamedRule> SumRules();
// Computes operators with the tag pointwise, and those that are like them.
bool PointwiseRule(PlacedCall& call);
// Computes _foreach_ operators, which are pointwise for lists of tensors.
bool ForeachRule(PlacedCall& call);
std::vector<NamedRule> PointwiseRules();

}  // namespace tessera
#endif  // PARALLEL_TENSOR_RULES_H_
