// Operators whose result has an element for each element of its arguments,
// broadcast: parts along one dimension of all of them give that part of it.
#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "parallel/tensor/rules.h"

namespace tessera {
namespace {

// Which dimension of a tensor is divided, counted from the last (1: the last
// itself). 0: none.
int64_t DividedFromEnd(const at::Tensor& tensor) {
  const std::optional<int64_t> dim = DividedDim(tensor);
  return dim.has_value() ? tensor.dim() - *dim : 0;
}

// The part of an argument that goes with parts along that dimension.
at::Tensor PartOfArgument(const at::Tensor& tensor, int64_t from_end,
                          const std::shared_ptr<PartGroup>& group,
                          int64_t groups = 1) {
  const int64_t dim = tensor.dim() - from_end;
  // What is broadcast along it is the same for all parts.
  if (dim < 0 || tensor.size(dim) == 1) return WholeForParts(tensor, group);
  return PartAs(tensor, TensorPlacement::Shard(dim, groups), group);
}

// An operator of one tensor that draws random numbers, on parts of what all
// draw alike.
bool DropoutRule(PlacedCall& call) {
  const std::optional<TensorPlacement> shard = call.Shard();
  if (!shard.has_value()) return false;
  const at::Tensor input = call.tensor(0);
  const double p = call[1].toDouble();
  if (!call[2].toBool() || p == 0) return call.Return(input);
  // All ranks draw for the whole, from one state of the generator.
  const at::Tensor part = PartForUse(input);
  if (p == 1) return call.Return(part * 0, *shard);
  const at::Tensor all =
      at::empty_strided(input.sizes(), input.strides(), part.options())
          .bernoulli_(1 - p);
  const at::Tensor mask = SlicePart(all, *shard, *call.group()).div_(1 - p);
  return call.Return(part * mask, *shard);
}

// A tensor of the sizes of the first argument, without random numbers; or that
// argument itself.
bool LikeRule(PlacedCall& call) {
  const std::optional<TensorPlacement> shard = call.Shard();
  if (!shard.has_value()) return false;
  const at::Tensor input = call.tensor(0), part = PartForUse(input);
  call[0] = part;
  call.Run();
  const at::Tensor result = call[0].toTensor();
  return result.is_same(part) ? call.Return(input)
                              : call.Return(result, *shard);
}

// Cuts the history of the part, and that of the tensor.
bool DetachInPlaceRule(PlacedCall& call) {
  if (!call.Divided().has_value()) return false;
  const at::Tensor tensor = call.tensor(0);
  PartForUse(tensor).detach_();
  auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta != nullptr) {
    meta->set_requires_grad(false, tensor.unsafeGetTensorImpl());
    meta->grad_fn_.reset();
    meta->output_nr_ = 0;
  }
  return call.Return(tensor);
}

using Tensors = std::vector<at::Tensor>;

// The arguments of a call that are lists of tensors, by position. Empty: their
// lengths differ.
std::vector<std::pair<size_t, Tensors>> ListsOf(PlacedCall& call) {
  std::vector<std::pair<size_t, Tensors>> lists;
  for (size_t i = 0; i < call.size(); ++i) {
    if (!call[i].isTensorList()) continue;
    lists.emplace_back(i, call[i].toTensorVector());
    if (lists.back().second.size() != lists[0].second.size()) return {};
  }
  return lists;
}

}  // namespace

bool PointwiseRule(PlacedCall& call) {
  const bool in_place = call.op().schema().is_mutable();
  const at::Tensor self = in_place ? call.tensor(0) : at::Tensor();
  // What is written keeps its placement.
  if (in_place && !call.Shard().has_value()) return false;
  for (size_t i = 0; i < call.size(); ++i) {
    if (call[i].isTensorList() || call[i].isOptionalTensorList()) return false;
  }
  std::optional<TensorPlacement> shard;  // of the first that is divided
  int64_t from_end = 0;
  for (size_t i = 0; !shard.has_value() && i < call.size(); ++i) {
    shard = call.Shard(i);
    if (shard.has_value()) from_end = call.tensor(i).dim() - shard->dim;
  }
  if (!shard.has_value()) return false;
  for (size_t i = 0; i < call.size(); ++i) {
    const at::Tensor tensor = call.tensor(i);
    if (!tensor.defined()) continue;
    call[i] = in_place && i == 0 ? PartForUse(self)
                                 : PartOfArgument(tensor, from_end,
                                                  call.group(), shard->groups);
  }
  call.Run();
  const at::Tensor part = call[0].toTensor();
  if (in_place) {
    RenewHistory(self);
    return call.Return(self);
  }
  return call.Return(
      part, TensorPlacement::Shard(part.dim() - from_end, shard->groups));
}

// What stands at one place of the lists goes together. Where the first of them
// is written, it keeps its placement; one that is not divided gets wholes.
bool ForeachRule(PlacedCall& call) {
  const bool in_place = call.op().schema().is_mutable();
  auto lists = ListsOf(call);
  if (lists.empty()) return false;
  const Tensors first = lists[0].second;
  std::vector<int64_t> from_end(first.size(), 0);
  bool any = false;
  for (size_t k = 0; k < first.size(); ++k) {
    for (const auto& [position, list] : lists) {
      if (from_end[k] == 0) from_end[k] = DividedFromEnd(list[k]);
      if (in_place) break;
    }
    if (in_place && from_end[k] == 0 && PlacedOf(first[k]) != nullptr) {
      return false;  // a view of a whole
    }
    any |= from_end[k] != 0;
  }
  for (size_t i = 0; i < call.size(); ++i) {
    // Its gradient would be a sum over parts here, and not there.
    if (call.tensor(i).defined() && call.tensor(i).requires_grad())
      return false;
  }
  if (!any) return false;
  for (auto& [position, list] : lists) {
    const bool written = in_place && position == lists[0].first;
    for (size_t k = 0; k < list.size(); ++k) {
      if (from_end[k] == 0) {
        list[k] = Whole(list[k]);
      } else {
        list[k] = written ? PartForUse(list[k])
                          : PartOfArgument(list[k], from_end[k], call.group());
      }
    }
    call[position] = list;
  }
  for (size_t i = 0; i < call.size(); ++i) {
    if (call[i].isTensor()) call[i] = Whole(call.tensor(i));
  }
  call.Run();
  if (in_place) {
    for (size_t k = 0; k < first.size(); ++k) {
      if (from_end[k] != 0) RenewHistory(first[k]);
    }
    return true;
  }
  Tensors results = call[0].toTensorVector();
  for (size_t k = 0; k < results.size(); ++k) {
    if (from_end[k] == 0) continue;
    const int64_t dim = results[k].dim() - from_end[k];
    results[k] = Place(results[k], TensorPlacement::Shard(dim), call.group());
  }
  call[0] = results;
  return true;
}

std::vector<NamedRule> PointwiseRules() {
  // Some have no tag.
  return {{"aten::copy_", &PointwiseRule},
          {"aten::fill_", &PointwiseRule},
          {"aten::zero_", &PointwiseRule},
          {"aten::masked_fill", &PointwiseRule},
          {"aten::masked_fill_", &PointwiseRule},
          {"aten::dropout", &DropoutRule},
          {"aten::contiguous", &LikeRule},
          {"aten::detach", &LikeRule},
          {"aten::detach_", &DetachInPlaceRule},
          {"aten::alias", &LikeRule},
          {"aten::clone", &LikeRule},
          {"aten::to", &LikeRule},
          {"aten::_to_copy", &LikeRule},
          {"aten::zeros_like", &LikeRule},
          {"aten::ones_like", &LikeRule},
          {"aten::empty_like", &LikeRule},
          {"aten::full_like", &LikeRule}};
}

}  // namespace tessera
