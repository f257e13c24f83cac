#include "parallel/plan/placement_walk.h"

#include <string>
#include <utility>

#include "base/above/above_autograd.h"
#include "base/check.h"
#include "parallel/tensor/placed.h"
#include "parallel/tensor/rules.h"

namespace tessera {
namespace {

thread_local PlacementWalk* t_walk = nullptr;

const c10::StorageImpl* MemoryOf(const at::Tensor& t) {
  return t.has_storage() ? t.storage().unsafeGetStorageImpl() : nullptr;
}

at::Tensor TensorOf(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

bool IsDividedAlong(const at::Tensor& t, int64_t dim) {
  const Placed* const placed = PlacedOf(t);
  return placed != nullptr && placed->placement == TensorPlacement::Shard(dim);
}

bool IsDivided(const at::Tensor& t) {
  const Placed* const placed = PlacedOf(t);
  return placed != nullptr && placed->placement.kind == TensorPlacement::kShard;
}

// Returns the first divided tensor of a value; undefined: it has none.
at::Tensor FirstDivided(const c10::IValue& value) {
  if (value.isTensor()) {
    return IsDivided(value.toTensor()) ? value.toTensor() : at::Tensor();
  }
  if (!value.isTensorList() && !value.isOptionalTensorList()) return {};
  for (const c10::IValue& each : value.toListRef()) {
    at::Tensor divided = FirstDivided(each);
    if (divided.defined()) return divided;
  }
  return {};
}

// Returns which dimension of `b` dimension `dim` of `a` is, where one is the
// other or its transpose; -1: neither.
int64_t SameDim(const at::Tensor& a, const at::Tensor& b, int64_t dim) {
  if (dim < 0 || a.dim() != b.dim()) return -1;
  if (a.sizes() == b.sizes() && a.strides() == b.strides()) return dim;
  if (a.dim() == 2 && a.size(0) == b.size(1) && a.size(1) == b.size(0) &&
      a.stride(0) == b.stride(1) && a.stride(1) == b.stride(0)) {
    return 1 - dim;
  }
  return -1;
}

}  // namespace

PlacementWalk::Scope::Scope(PlacementWalk* walk) {
  TESSERA_CHECK(t_walk == nullptr) << "walks are not nested";
  t_walk = walk;
}

PlacementWalk::Scope::~Scope() { t_walk = nullptr; }

void PlacementWalk::Add(size_t parameter, const at::Tensor& tensor,
                        bool by_use) {
  parameters_.insert(MemoryOf(tensor));
  if (!by_use) return;
  Entry& entry = entries_[MemoryOf(tensor)];
  entry.parameter = parameter;
  entry.tensor = tensor;
}

void PlacementWalk::EndForward() {
  for (auto& [memory, entry] : entries_) {
    if (entry.dim == kUndecided) entry.dim = kWhole;
  }
}

void PlacementWalk::Gathers() {
  if (t_walk != this) return;
  if (!gathered_.has_value()) gathered_ = given_;
  gathers_parameters_ |= given_parameter_;
}

// What an operator is given is looked at before its rule is, since a rule that
// has no way for it does not say why.
void PlacementWalk::NoteGiven(Arguments arguments) {
  for (const c10::IValue& each : arguments) {
    const at::Tensor divided = FirstDivided(each);
    if (!divided.defined()) continue;
    const c10::StorageImpl* const memory = MemoryOf(PlacedOf(divided)->part);
    const auto made = made_by_.find(memory);
    given_ = made != made_by_.end() ? std::optional<size_t>(made->second.second)
                                    : last_column_;
    given_parameter_ = parameters_.contains(memory);
    return;
  }
}

const PlacementWalk::Use& PlacementWalk::UseOf(const c10::OperatorHandle& op) {
  auto [it, is_new] = uses_.try_emplace(&op.schema());
  if (!is_new) return it->second;
  Use& use = it->second;
  const std::string& name = op.schema().name();
  const bool plain = op.schema().overload_name().empty();
  if (plain &&
      (name == "aten::matmul" || name == "aten::mm" || name == "aten::bmm")) {
    use.kind = Kind::kProduct;
  } else if (plain && name == "aten::linear") {
    use = {Kind::kProduct, 0, 1, 2, true};
  } else if (plain && name == "aten::addmm") {
    use = {Kind::kProduct, 1, 2, 0, false};
  } else if (plain && name == "aten::embedding") {
    use.kind = Kind::kLookup;
  } else if (FindRule(op) == &PointwiseRule) {
    use.kind = Kind::kElementwise;
  }
  return use;
}

PlacementWalk::Entry* PlacementWalk::Find(const c10::IValue& argument) {
  const at::Tensor t = TensorOf(argument);
  if (!t.defined() || PlacedOf(t) != nullptr) return nullptr;
  const auto found = entries_.find(MemoryOf(t));
  return found == entries_.end() ? nullptr : &found->second;
}

void PlacementWalk::Decide(Entry& entry, const TensorPlacement& placement,
                           bool row) {
  const auto [kind, dim, groups] = placement;
  entry.dim = kWhole;
  if (dim < 0 || entry.tensor.size(dim) % (groups * group_->size()) != 0) {
    return;
  }
  entry.dim = dim;
  entry.groups = groups;
  entry.decision = decisions_.size();
  if (entry.tensor.dim() >= 2) {
    last_column_ = row ? std::nullopt : std::optional<size_t>(entry.decision);
  }
  decisions_.push_back({entry.parameter, placement, row});
}

bool PlacementWalk::PlaceArgument(const Entry& entry, c10::IValue& argument) {
  const at::Tensor whole = argument.toTensor();
  const int64_t dim = SameDim(entry.tensor, whole, entry.dim);
  if (dim < 0) return false;
  const auto placement = TensorPlacement::Shard(dim, entry.groups);
  argument = Place(entry.groups == 1 ? group_->SliceOf(whole, dim)
                                     : SlicePart(whole, placement, *group_),
                   placement, group_);
  return true;
}

bool PlacementWalk::PlaceFactor(Entry& entry, c10::IValue& argument,
                                const Factor& factor) {
  if (entry.dim == kUndecided) {
    const bool row = IsDividedAlong(factor.other, factor.others_inputs);
    const int64_t along = row                       ? factor.inputs
                          : IsDivided(factor.other) ? kWhole
                                                    : factor.outputs;
    Decide(entry,
           TensorPlacement::Shard(
               SameDim(argument.toTensor(), entry.tensor, along)),
           row);
  }
  return PlaceArgument(entry, argument);
}

bool PlacementWalk::PlaceProduct(const Use& use, Arguments arguments) {
  const at::Tensor a = TensorOf(arguments[use.a]);
  const at::Tensor b = TensorOf(arguments[use.b]);
  if (a.dim() < 2 || b.dim() < 2) return false;
  const int64_t inputs_b = b.dim() - (use.transposed ? 1 : 2);
  const int64_t outputs_b = b.dim() - (use.transposed ? 2 : 1);
  bool changed = false;
  if (Entry* const weight = Find(arguments[use.b])) {
    changed = PlaceFactor(*weight, arguments[use.b],
                          {inputs_b, outputs_b, a, a.dim() - 1});
  } else if (Entry* const first = Find(arguments[use.a])) {
    changed = PlaceFactor(*first, arguments[use.a],
                          {a.dim() - 1, a.dim() - 2, b, inputs_b});
  }
  const std::optional<TensorPlacement> shard =
      ShardOf(TensorOf(arguments[use.b]));
  if (use.bias >= 0 && shard.has_value() && shard->dim == outputs_b) {
    changed |= PlaceVector(arguments[static_cast<size_t>(use.bias)],
                           b.size(outputs_b), shard->groups);
  }
  return changed;
}

bool PlacementWalk::PlaceTable(Arguments arguments) {
  Entry* const table = Find(arguments[0]);
  if (table == nullptr) return false;
  if (table->dim == kUndecided) {
    // Otherwise rows have no rule (parallel/tensor/rules_layers.cc).
    const bool plain = arguments[2].toInt() < 0 && !arguments[3].toBool() &&
                       !arguments[4].toBool();
    Decide(*table, TensorPlacement::Shard(plain ? 0 : kWhole), /*row=*/true);
  }
  return PlaceArgument(*table, arguments[0]);
}

// Divides a parameter [size] that meets a dimension of that size, divided.
bool PlacementWalk::PlaceVector(c10::IValue& argument, int64_t size,
                                int64_t groups) {
  Entry* const vector = Find(argument);
  if (vector == nullptr || vector->tensor.dim() != 1 ||
      vector->tensor.size(0) != size) {
    return false;
  }
  if (vector->dim == kUndecided) {
    Decide(*vector, TensorPlacement::Shard(0, groups), /*row=*/false);
  }
  return PlaceArgument(*vector, argument);
}

bool PlacementWalk::PlaceVectors(Arguments arguments, bool in_place) {
  int64_t size = -1, groups = 1;
  for (const c10::IValue& each : arguments) {
    const at::Tensor t = TensorOf(each);
    const std::optional<TensorPlacement> shard = ShardOf(t);
    if (!shard.has_value()) continue;
    if (shard->dim != t.dim() - 1) return false;
    size = t.size(-1);
    groups = shard->groups;
    break;
  }
  if (size < 0) return false;
  bool changed = false;
  for (size_t i = in_place ? 1 : 0; i < arguments.size(); ++i) {
    changed |= PlaceVector(arguments[i], size, groups);
  }
  return changed;
}

bool PlacementWalk::Run(const c10::OperatorHandle& op,
                        torch::jit::Stack* stack) {
  const Use use = UseOf(op);
  const size_t n = op.schema().arguments().size();
  const Arguments arguments(stack->data() + (stack->size() - n), n);
  NoteGiven(arguments);
  if (use.kind == Kind::kOther) return false;
  const Entry* weight = nullptr;
  bool changed = false;
  if (use.kind == Kind::kProduct) {
    weight = Find(arguments[use.b]);
    if (weight == nullptr) weight = Find(arguments[use.a]);
    changed = PlaceProduct(use, arguments);
  } else if (use.kind == Kind::kLookup) {
    changed = PlaceTable(arguments);
  } else {
    changed = PlaceVectors(arguments, op.schema().is_mutable());
  }
  if (!changed) return false;
  op.callBoxed(stack);  // comes here again, with nothing left to place
  const Placed* const result = PlacedOf(TensorOf(stack->back()));
  if (weight != nullptr && weight->dim >= 0 && result != nullptr) {
    made_by_[MemoryOf(result->part)] = {result->part.storage(),
                                        weight->decision};
  }
  return true;
}

namespace {

bool OnUse(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
           torch::jit::Stack* stack) {
  return t_walk != nullptr && t_walk->Run(op, stack);
}

// Before parts are computed with, which it makes.
[[maybe_unused]] const bool walk_added = AddAboveHandler(&OnUse, /*rank=*/2);

}  // namespace
}  // namespace tessera
