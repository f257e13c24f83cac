// Operators of layers: norms, softmax, embeddings, attention, losses, sums.
#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "parallel/tensor/rules.h"

namespace tessera {
namespace {

bool IsUndefined(PlacedCall& call, size_t i) {
  return !call.tensor(i).defined();
}

// Norms over the last dimensions, of which none is divided; arguments 2 and,
// where `has_bias`, 3 are whole parameters.
template <bool has_bias>
bool NormRule(PlacedCall& call) {
  const std::optional<int64_t> dim = call.Divided();
  const int64_t normed = static_cast<int64_t>(call[1].toIntVector().size());
  if (!dim.has_value() || *dim >= call.tensor(0).dim() - normed) return false;
  call[0] = PartForUse(call.tensor(0));
  for (size_t i = 2; i <= (has_bias ? 3 : 2); ++i) {
    if (IsUndefined(call, i)) continue;
    call[i] = call.group()->SumInBackward(Whole(call.tensor(i)));
  }
  return call.RunAs(TensorPlacement::Shard(*dim));
}

// Along dimension argument 1, if that is not divided.
bool SoftmaxRule(PlacedCall& call) {
  const std::optional<int64_t> dim = call.Divided();
  if (!dim.has_value() || call.Dim(1, call.tensor(0).dim()) == *dim) {
    return false;
  }
  call[0] = PartForUse(call.tensor(0));
  return call.RunAs(TensorPlacement::Shard(*dim));
}

// Rows of a matrix that is divided by rows (vocabulary-parallel): each rank
// gives those that it has, and zeros.
void CheckRange(const at::Tensor& indices, int64_t size, const char* what) {
  at::_assert_async(indices.ge(0).logical_and_(indices.lt(size)).all(), what);
}

at::Tensor RowsOf(const at::Tensor& part, const at::Tensor& indices,
                  PartGroup* group) {
  CheckRange(indices, part.size(0) * group->size(),
             "embedding: an index is not that of a row");
  const int64_t first = group->rank() * part.size(0);
  const at::Tensor own = indices - first;
  const at::Tensor elsewhere = own.lt(0).logical_or_(own.ge(part.size(0)));
  const at::Tensor rows = at::embedding(part, own.masked_fill(elsewhere, 0));
  return group->Sum(rows.masked_fill(elsewhere.unsqueeze(-1), 0));
}

bool EmbeddingRule(PlacedCall& call) {
  const std::optional<int64_t> dim = call.Divided();
  if (!dim.has_value() || call[3].toBool() || call[4].toBool()) {
    return false;  // by frequency, sparse
  }
  const at::Tensor indices = Whole(call.tensor(1));
  if (*dim == 0) {
    if (call[2].toInt() >= 0) return false;  // padding has no gradient
    return call.Return(
        RowsOf(PartForUse(call.tensor(0)), indices, call.group().get()));
  }
  call[0] = PartForUse(call.tensor(0));
  call[1] = indices;
  return call.RunAs(TensorPlacement::Shard(indices.dim()));
}

// Query, key and value [..., heads, length, dims], divided alike by heads or
// before them.
bool AttentionRule(PlacedCall& call) {
  const at::Tensor query = call.tensor(0);
  const std::optional<int64_t> dim = call.Divided();
  if (!dim.has_value() || *dim >= query.dim() - 2) return false;
  if (call[4].toDouble() > 0) return false;  // dropout draws for all heads
  const auto group = call.group();
  for (size_t i = 1; i < 3; ++i) {
    const at::Tensor other = call.tensor(i);
    if (other.dim() != query.dim() || other.size(*dim) % call.ranks() != 0) {
      return false;
    }
  }
  for (size_t i = 0; i < 3; ++i) {
    call[i] = PartAs(call.tensor(i), *dim, group);
  }
  const at::Tensor mask = call.tensor(3);
  if (mask.defined()) {
    const int64_t along = mask.dim() - (query.dim() - *dim);
    call[3] = along >= 0 && mask.size(along) > 1
                  ? PartAs(mask, along, group)
                  : group->SumInBackward(Whole(mask));
  }
  return call.RunAs(TensorPlacement::Shard(*dim));
}

// Logits [tokens, classes], divided by classes (vocabulary-parallel): no rank
// has more than its part.
bool CrossEntropyRule(PlacedCall& call) {
  if (call.Divided() != 1 || call.tensor(0).dim() != 2 ||
      !IsUndefined(call, 2) || call[5].toDouble() != 0) {
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

// A sum over some dimensions: of a divided one, the parts' sums are added up.
bool SumRule(PlacedCall& call) {
  const std::optional<int64_t> divided = call.Divided();
  if (!divided.has_value()) return false;
  const int64_t dims = call.tensor(0).dim();
  std::vector<int64_t> over;
  bool keeps = false;
  if (call.size() > 2 && !call[1].isNone()) {
    over = call[1].toIntVector();
    keeps = call[2].toBool();
  }
  bool along = over.empty();
  int64_t now = *divided;
  for (int64_t& dim : over) {
    if (dim < 0) dim += dims;
    along |= dim == *divided;
    now -= !keeps && dim < *divided ? 1 : 0;
  }
  call[0] = PartForUse(call.tensor(0));
  if (!along) return call.RunAs(TensorPlacement::Shard(now));
  const auto group = call.group();
  call.Run();
  const at::Tensor part = call[0].toTensor();
  return call.Return(group->Sum(part));
}

// A mean over dimensions of which none is divided.
bool MeanRule(PlacedCall& call) {
  const std::optional<int64_t> divided = call.Divided();
  if (!divided.has_value() || call.size() < 3 || call[1].isNone() ||
      call[1].toIntVector().empty()) {
    return false;
  }
  const int64_t dims = call.tensor(0).dim();
  for (int64_t dim : call[1].toIntVector()) {
    if ((dim < 0 ? dim + dims : dim) == *divided) return false;
  }
  return SumRule(call);
}

}  // namespace

std::vector<NamedRule> LayerRules() {
  return {{"aten::layer_norm", &NormRule<true>},
          {"aten::rms_norm", &NormRule<false>},
          {"aten::softmax.int", &SoftmaxRule},
          {"aten::log_softmax.int", &SoftmaxRule},
          {"aten::_softmax", &SoftmaxRule},
          {"aten::_log_softmax", &SoftmaxRule},
          {"aten::embedding", &EmbeddingRule},
          {"aten::scaled_dot_product_attention", &AttentionRule},
          {"aten::cross_entropy_loss", &CrossEntropyRule},
          {"aten::sum.", &SumRule},
          {"aten::sum.dim_IntList", &SumRule},
          {"aten::mean.dim", &MeanRule}};
}

}  // namespace tessera
