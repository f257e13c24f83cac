// Operators of layers: norms, softmax, embeddings.
#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "parallel/tensor/rules.h"

namespace tessera {
namespace {

// Norms over the last dimensions, of which none is divided; arguments 2 and,
// where `has_bias`, 3 are whole parameters.
template <bool has_bias>
bool NormRule(PlacedCall& call) {
  const std::optional<TensorPlacement> shard = call.Shard();
  const int64_t normed = static_cast<int64_t>(call[1].toIntVector().size());
  if (!shard.has_value() || shard->dim >= call.tensor(0).dim() - normed) {
    return false;
  }
  call[0] = PartForUse(call.tensor(0));
  for (size_t i = 2; i <= (has_bias ? 3 : 2); ++i) {
    if (!call.tensor(i).defined()) continue;
    call[i] = WholeForParts(call.tensor(i), call.group());
  }
  return call.RunAs(*shard);
}

// Along dimension argument 1, if that is not divided.
bool SoftmaxRule(PlacedCall& call) {
  const std::optional<TensorPlacement> shard = call.Shard();
  if (!shard.has_value() || call.Dim(1, call.tensor(0).dim()) == shard->dim) {
    return false;
  }
  call[0] = PartForUse(call.tensor(0));
  return call.RunAs(*shard);
}

// Rows of a matrix that is divided by rows (vocabulary-parallel): each rank
// gives those that it has, and zeros.
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
  if (call[3].toBool() || call[4].toBool()) return false;  // frequency, sparse
  const std::optional<int64_t> dim = call.Divided();
  const std::optional<TensorPlacement> divided_indices = call.Shard(1);
  if (!call.Shard().has_value() && divided_indices.has_value()) {
    call[0] = WholeForParts(call.tensor(0), call.group());
    call[1] = PartForUse(call.tensor(1));
    return call.RunAs(*divided_indices);
  }
  if (!dim.has_value()) return false;
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

}  // namespace

std::vector<NamedRule> LayerRules() {
  return {{"aten::layer_norm", &NormRule<true>},
          {"aten::rms_norm", &NormRule<false>},
          {"aten::softmax.int", &SoftmaxRule},
          {"aten::log_softmax.int", &SoftmaxRule},
          {"aten::_softmax", &SoftmaxRule},
          {"aten::_log_softmax", &SoftmaxRule},
          {"aten::embedding", &EmbeddingRule}};
}

}  // namespace tessera
