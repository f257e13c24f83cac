// Attention of query, key and value [..., heads, length, dims]. Divided by
// heads, or before them, each rank has its own. Divided by length, the ranks
// exchange their slices for some heads of all positions, and back
// (DeepSpeed-Ulysses; Jacobs et al., 2023); where they do not divide the heads,
// each computes its queries with keys and values that are gathered.
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "parallel/tensor/rules.h"

namespace tessera {
namespace {

constexpr size_t kMask = 3, kDropout = 4, kCausal = 5;

// What of a mask [..., heads, queries, keys] goes with parts along a dimension,
// counted from the last.
at::Tensor PartOfMask(const at::Tensor& mask, int64_t from_end,
                      const std::shared_ptr<PartGroup>& group) {
  const int64_t along = mask.dim() - from_end;
  return along >= 0 && mask.size(along) > 1 ? PartAs(mask, along, group)
                                            : WholeForParts(mask, group);
}

// Whether the ranks divide dimension `dim` of query, key and value.
bool DivideAll(const PlacedCall& call, int64_t dim) {
  const int64_t dims = call.tensor(0).dim();
  for (size_t i = 0; i < 3; ++i) {
    const at::Tensor tensor = call.tensor(i);
    if (tensor.dim() != dims || tensor.size(dim) % call.ranks() != 0) {
      return false;
    }
  }
  return true;
}

bool ByHeads(PlacedCall& call, int64_t dim) {
  if (!DivideAll(call, dim)) return false;
  const at::Tensor mask = call.tensor(kMask);
  const int64_t from_end = call.tensor(0).dim() - dim;
  for (size_t i = 0; i < 3; ++i) {
    call[i] = PartAs(call.tensor(i), dim, call.group());
  }
  if (mask.defined()) call[kMask] = PartOfMask(mask, from_end, call.group());
  return call.RunAs(TensorPlacement::Shard(dim));
}

// The dimension before the length that the ranks divide instead; none.
std::optional<int64_t> DimToExchange(const PlacedCall& call, int64_t length) {
  for (size_t i = 0; i < 3; ++i) {
    if (call.Divided(i) != length) return std::nullopt;
  }
  for (int64_t dim = length - 1; dim >= 0; --dim) {
    if (DivideAll(call, dim)) return dim;
  }
  return std::nullopt;
}

bool ByExchange(PlacedCall& call, int64_t length, int64_t dim) {
  const auto& group = call.group();
  const int64_t from_end = call.tensor(0).dim() - dim;
  const at::Tensor mask = call.tensor(kMask);
  for (size_t i = 0; i < 3; ++i) {
    call[i] = group->Exchange(PartForUse(call.tensor(i)), length, dim);
  }
  if (mask.defined()) call[kMask] = PartOfMask(mask, from_end, group);
  call.Run();
  const at::Tensor part = call[0].toTensor();
  return call.Return(group->Exchange(part, dim, length),
                     TensorPlacement::Shard(length));
}

// Keys that this rank's queries see: those up to their own position.
at::Tensor CausalRows(const at::Tensor& query, int64_t queries, int64_t keys,
                      int64_t rank) {
  return at::ones({queries, keys}, query.options().dtype(at::kBool))
      .tril(rank * queries);
}

bool ByQueries(PlacedCall& call, int64_t length) {
  const auto& group = call.group();
  const at::Tensor query = PartForUse(call.tensor(0));
  const at::Tensor mask = call.tensor(kMask);
  if (mask.defined()) {
    call[kMask] = PartOfMask(mask, 2, group);
  } else if (call[kCausal].toBool()) {
    call[kMask] = CausalRows(query, query.size(length),
                             call.tensor(1).size(length), group->rank());
    call[kCausal] = false;
  }
  call[0] = query;
  for (size_t i = 1; i < 3; ++i) {
    call[i] = WholeForParts(call.tensor(i), group);
  }
  return call.RunAs(TensorPlacement::Shard(length));
}

bool AttentionRule(PlacedCall& call) {
  const std::optional<int64_t> dim = call.Divided();
  const int64_t length = call.tensor(0).dim() - 2;
  if (!dim.has_value() || *dim > length || length < 0) return false;
  if (call[kDropout].toDouble() > 0) return false;  // draws for all heads
  if (*dim < length) return ByHeads(call, *dim);
  const std::optional<int64_t> other = DimToExchange(call, length);
  return other.has_value() ? ByExchange(call, length, *other)
                           : ByQueries(call, length);
}

}  // namespace

std::vector<NamedRule> AttentionRules() {
  return {{"aten::scaled_dot_product_attention", &AttentionRule}};
}

}  // namespace tessera
