// Operators whose result has an element for each element of its arguments,
// broadcast: parts along one dimension of all of them give that part of it.
#include <torch/torch.h>

#include "parallel/tensor/rules.h"

namespace tessera {
namespace {

// Which dimension is divided, counted from the last (1: the last itself), by
// the first argument that is S(d). 0: none.
int64_t DividedFromEnd(PlacedCall& call) {
  for (size_t i = 0; i < call.size(); ++i) {
    const Placed* const placed = call.placed(i);
    if (placed != nullptr &&
        placed->placement.kind == TensorPlacement::kShard) {
      return call.tensor(i).dim() - placed->placement.dim;
    }
  }
  return 0;
}

// The part of an argument that goes with parts along that dimension.
at::Tensor PartOfArgument(const at::Tensor& tensor, int64_t from_end,
                          const std::shared_ptr<PartGroup>& group) {
  const int64_t dim = tensor.dim() - from_end;
  // What is broadcast along it is the same for all parts.
  if (dim < 0 || tensor.size(dim) == 1)
    return group->SumInBackward(Whole(tensor));
  return PartAs(tensor, dim, group);
}

// An operator of one tensor that draws random numbers, on parts of what all
// draw alike.
bool DropoutRule(PlacedCall& call) {
  const Placed* const placed = call.placed(0);
  if (placed == nullptr || placed->placement.kind != TensorPlacement::kShard) {
    return false;
  }
  const at::Tensor input = call.tensor(0);
  const double p = call[1].toDouble();
  if (!call[2].toBool() || p == 0) {
    return call.Return(PartForUse(input), placed->placement);
  }
  // All ranks draw for the whole, from one state of the generator.
  const at::Tensor part = PartForUse(input);
  if (p == 1) return call.Return(part * 0, placed->placement);
  const at::Tensor all =
      at::empty(input.sizes(), part.options()).bernoulli_(1 - p);
  const at::Tensor mask =
      call.group()->SliceOf(all, placed->placement.dim).div(1 - p);
  return call.Return(part * mask, placed->placement);
}

// A new tensor of the sizes of the first argument, without random numbers.
bool LikeRule(PlacedCall& call) {
  const Placed* const placed = call.placed(0);
  if (placed == nullptr || placed->placement.kind != TensorPlacement::kShard) {
    return false;
  }
  const TensorPlacement placement = placed->placement;
  call[0] = PartForUse(call.tensor(0));
  return call.RunAs(placement);
}

}  // namespace

bool PointwiseRule(PlacedCall& call) {
  const bool in_place = call.op().schema().is_mutable();
  const at::Tensor self = in_place ? call.tensor(0) : at::Tensor();
  const Placed* const written = in_place ? PlacedOf(self) : nullptr;
  // What is written keeps its placement.
  if (in_place && (written == nullptr ||
                   written->placement.kind != TensorPlacement::kShard)) {
    return false;
  }
  for (size_t i = 0; i < call.size(); ++i) {
    if (call[i].isTensorList() || call[i].isOptionalTensorList()) return false;
  }
  const int64_t from_end = DividedFromEnd(call);
  if (from_end == 0) return false;
  for (size_t i = 0; i < call.size(); ++i) {
    const at::Tensor tensor = call.tensor(i);
    if (!tensor.defined()) continue;
    call[i] = in_place && i == 0
                  ? PartForUse(self)
                  : PartOfArgument(tensor, from_end, call.group());
  }
  call.Run();
  const at::Tensor part = call[0].toTensor();
  if (in_place) {
    RenewHistory(self);
    return call.Return(self);
  }
  return call.Return(part, TensorPlacement::Shard(part.dim() - from_end));
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
