#include "parallel/tensor/rules.h"

#include <torch/torch.h>

#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace tessera {
namespace {

std::shared_ptr<PartGroup> GroupOf(const c10::IValue& value) {
  if (value.isTensor()) {
    const Placed* const placed = PlacedOf(value.toTensor());
    return placed != nullptr ? placed->group : nullptr;
  }
  if (!value.isTensorList() && !value.isOptionalTensorList()) return nullptr;
  for (const c10::IValue& each : value.toListRef()) {
    if (auto group = GroupOf(each)) return group;
  }
  return nullptr;
}

using Rules = absl::flat_hash_map<std::string, PlacedRule>;

Rules AllRules() {
  Rules rules;
  for (const auto& some : {ProductRules(), ViewRules(), LayerRules(),
                           AttentionRules(), SumRules(), PointwiseRules()}) {
    for (const NamedRule& each : some) rules[each.name] = each.rule;
  }
  return rules;
}

// Whether it computes each element of a list's tensors by itself.
bool IsPointwiseForeach(const std::string& name) {
  return absl::StartsWith(name, "aten::_foreach_") &&
         name != "aten::_foreach_norm" && name != "aten::_foreach_max" &&
         name != "aten::_foreach_powsum";
}

}  // namespace

PlacedCall::PlacedCall(const c10::OperatorHandle& op, torch::jit::Stack* stack)
    : op_(op),
      stack_(*stack),
      begin_(stack->size() - op.schema().arguments().size()) {
  for (size_t i = 0; group_ == nullptr && i < size(); ++i) {
    group_ = GroupOf((*this)[i]);
  }
  if (group_ != nullptr && size() > 0 && placed(0) != nullptr) {
    first_ = tensor(0);
  }
}

at::Tensor PlacedCall::tensor(size_t i) const {
  const c10::IValue& value = stack_[begin_ + i];
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

int64_t PlacedCall::Dim(size_t i, int64_t dims) const {
  const int64_t dim = stack_[begin_ + i].toInt();
  return dim < 0 ? dim + dims : dim;
}

bool PlacedCall::RunAs(TensorPlacement placement) {
  Run();
  stack_.back() = Made(stack_.back().toTensor(), placement);
  return true;
}

at::Tensor PlacedCall::Made(at::Tensor part, TensorPlacement placement) const {
  const bool view = first_.defined() && part.is_view();
  at::Tensor made = Place(std::move(part), placement, group_);
  if (!view) return made;
  const c10::intrusive_ptr<c10::TensorImpl> base =
      PlacedOf(first_)->base.lock();
  const at::Tensor of = base != nullptr ? at::Tensor(base) : first_;
  PlacedOf(made)->base =
      c10::weak_intrusive_ptr<c10::TensorImpl>(of.getIntrusivePtr());
  return made;
}

bool PlacedCall::Return(at::Tensor result) {
  stack_.resize(begin_);
  stack_.emplace_back(std::move(result));
  return true;
}

bool PlacedCall::ReturnList(std::vector<at::Tensor> results) {
  stack_.resize(begin_);
  stack_.emplace_back(std::move(results));
  return true;
}

void CheckRange(const at::Tensor& indices, int64_t size, const char* what) {
  at::_assert_async(indices.ge(0).logical_and_(indices.lt(size)).all(), what);
}

PlacedRule FindRule(const c10::OperatorHandle& op) {
  static const Rules* const rules = new Rules(AllRules());
  const c10::FunctionSchema& schema = op.schema();
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.is_out()) return nullptr;
  }
  auto found =
      rules->find(absl::StrCat(schema.name(), ".", schema.overload_name()));
  if (found == rules->end()) found = rules->find(schema.name());
  if (found != rules->end()) return found->second;
  if (IsPointwiseForeach(schema.name())) return &ForeachRule;
  const bool one_tensor =
      schema.returns().size() == 1 &&
      schema.returns()[0].type()->kind() == c10::TypeKind::TensorType;
  return op.hasTag(at::Tag::pointwise) && one_tensor &&
                 !op.hasTag(at::Tag::nondeterministic_seeded)
             ? &PointwiseRule
             : nullptr;
}

}  // namespace tessera
