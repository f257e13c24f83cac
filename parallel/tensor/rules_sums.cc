// Sums, means and losses: of what is divided, the parts' sums are added up.
#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "parallel/tensor/rules.h"

namespace tessera {
namespace {

// A sum or a mean over some dimensions, or all.
template <bool is_mean>
bool SumRule(PlacedCall& call) {
  const std::optional<TensorPlacement> shard = call.Shard();
  if (!shard.has_value()) return false;
  const int64_t dims = call.tensor(0).dim();
  std::vector<int64_t> over;
  bool keeps = false;
  if (call.size() > 2 && !call[1].isNone()) {
    over = call[1].toIntVector();
    keeps = call[2].toBool();
  }
  bool along = over.empty();
  int64_t now = shard->dim;
  for (int64_t& dim : over) {
    if (dim < 0) dim += dims;
    along |= dim == shard->dim;
    now -= !keeps && dim < shard->dim ? 1 : 0;
  }
  call[0] = PartForUse(call.tensor(0));
  if (!along) return call.RunAs(TensorPlacement::Shard(now, shard->groups));
  const auto group = call.group();
  call.Run();
  // The sum of means may be too large for 16 bits.
  const at::Tensor own = call[0].toTensor();
  return call.Return(group->Sum(is_mean ? own / group->size() : own));
}

// Cross entropy of logits [tokens, classes] that are divided by classes
// (vocabulary-parallel): no rank has more than its part.
bool EntropyByClasses(PlacedCall& call) {
  if (call.Divided() != 1 || call.tensor(0).dim() != 2 ||
      call.tensor(2).defined() || call[5].toDouble() != 0) {
    return false;
  }
  const at::Tensor targets = Whole(call.tensor(1));
  if (targets.dim() != 1 || !at::isIntegralType(targets.scalar_type(), false)) {
    return false;
  }
  const int64_t reduction = call[3].toInt(), ignored = call[4].toInt();
  const auto group = call.group();
  at::Tensor logits = PartForUse(call.tensor(0));
  const at::ScalarType dtype = logits.scalar_type();
  if (at::isReducedFloatingType(dtype)) logits = logits.to(at::kFloat);
  const int64_t classes = logits.size(1), first = group->rank() * classes;
  const at::Tensor most =
      group->GatherOf(logits.detach().amax(1, true), 1).amax(1, true);
  const at::Tensor shifted = logits - most;
  const at::Tensor counts = targets.ne(ignored);
  CheckRange(targets.masked_fill(~counts, 0), classes * group->size(),
             "cross_entropy: a target is not that of a class");
  const at::Tensor own = targets - first;
  const at::Tensor elsewhere = own.lt(0).logical_or_(own.ge(classes));
  const at::Tensor chosen =
      shifted.gather(1, own.masked_fill(elsewhere, 0).unsqueeze(1)).squeeze(1);
  const std::vector<at::Tensor> both =  // addends of the sums, and logits
      group
          ->Sum(at::stack(
              {shifted.exp().sum(1), chosen.masked_fill(elsewhere, 0)}))
          .unbind();
  const at::Tensor losses = (both[0].log() - both[1]).masked_fill(~counts, 0);
  if (reduction == at::Reduction::None) return call.Return(losses.to(dtype));
  const at::Tensor sum = losses.sum();
  const at::Tensor result =
      reduction == at::Reduction::Sum ? sum : sum / counts.sum();
  return call.Return(result.to(dtype));
}

// The mean of sums over samples of parts, by how many of them count.
at::Tensor MeanOfSums(const at::Tensor& sum, const at::Tensor& targets,
                      int64_t ignored, PartGroup* group) {
  const at::Tensor count = targets.ne(ignored).sum().to(at::kDouble);
  const std::vector<at::Tensor> both =
      group->Sum(at::stack({sum.to(at::kDouble), count})).unbind();
  return both[0] / both[1];
}

// A loss of scores [samples, classes, ...] and classes [samples, ...], divided
// by samples. Arguments 2 to 4 are weights of classes, the reduction, and a
// class that does not count.
bool BySamples(PlacedCall& call) {
  const std::optional<TensorPlacement> shard = call.Shard();
  const at::Tensor scores = call.tensor(0), targets = call.tensor(1);
  if (!shard.has_value() || scores.dim() < 2 || shard->dim == 1 ||
      call.tensor(2).defined() || targets.dim() != scores.dim() - 1 ||
      !at::isIntegralType(targets.scalar_type(), false)) {
    return false;
  }
  const auto& group = call.group();
  const TensorPlacement as = TensorPlacement::Shard(
      shard->dim == 0 ? 0 : shard->dim - 1, shard->groups);
  const int64_t reduction = call[3].toInt(), ignored = call[4].toInt();
  const at::ScalarType dtype = scores.scalar_type();
  const at::Tensor part = PartForUse(scores);
  const at::Tensor own = PartAs(targets, as, group);
  call[0] = at::isReducedFloatingType(dtype) ? part.to(at::kFloat) : part;
  call[1] = own;
  if (reduction == at::Reduction::None) return call.RunAs(as);
  call[3] = static_cast<int64_t>(at::Reduction::Sum);
  call.Run();
  const at::Tensor sum = call[0].toTensor();
  const at::Tensor result = reduction == at::Reduction::Sum
                                ? group->Sum(sum)
                                : MeanOfSums(sum, own, ignored, group.get());
  return call.Return(result.to(dtype));
}

bool CrossEntropyRule(PlacedCall& call) {
  return EntropyByClasses(call) || BySamples(call);
}

// A loss of each element, and what `reduction` says of all of them.
bool ElementLossRule(PlacedCall& call) {
  const std::optional<int> at =
      call.op().schema().argumentIndexWithName("reduction");
  if (!at.has_value()) return false;
  c10::IValue& argument = call[static_cast<size_t>(*at)];
  const c10::IValue before = argument;
  argument = static_cast<int64_t>(at::Reduction::None);
  if (!PointwiseRule(call)) {
    argument = before;
    return false;
  }
  const int64_t reduction = before.toInt();
  if (reduction == at::Reduction::None) return true;
  const at::Tensor losses = call[0].toTensor();
  return call.Return(reduction == at::Reduction::Sum ? losses.sum()
                                                     : losses.mean());
}

}  // namespace

std::vector<NamedRule> SumRules() {
  return {{"aten::sum.", &SumRule<false>},
          {"aten::sum.dim_IntList", &SumRule<false>},
          {"aten::mean.", &SumRule<true>},
          {"aten::mean.dim", &SumRule<true>},
          {"aten::cross_entropy_loss", &CrossEntropyRule},
          {"aten::nll_loss", &BySamples},
          {"aten::nll_loss_nd", &BySamples},
          {"aten::mse_loss", &ElementLossRule},
          {"aten::l1_loss", &ElementLossRule},
          {"aten::smooth_l1_loss", &ElementLossRule},
          {"aten::huber_loss", &ElementLossRule},
          {"aten::binary_cross_entropy", &ElementLossRule},
          {"aten::binary_cross_entropy_with_logits", &ElementLossRule}};
}

}  // namespace tessera
