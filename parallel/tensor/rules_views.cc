// Operators that only say how elements lie, or choose some of them: along a
// dimension that is not divided they are the same for each part.
#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "parallel/tensor/rules.h"

namespace tessera {
namespace {

// Returns where dimension `dim` of a tensor is in another view of its elements:
// the dimension before which there are as many elements, and whose size the
// ranks divide. A dimension that is split stays divided along its first part;
// one that is merged into the next ones is divided along the merged one.
std::optional<int64_t> DimInView(at::IntArrayRef from, int64_t dim,
                                 at::IntArrayRef to, int64_t ranks) {
  int64_t before = 1;
  for (int64_t i = 0; i < dim; ++i) before *= from[static_cast<size_t>(i)];
  int64_t seen = 1;
  for (size_t i = 0; i < to.size(); ++i) {
    if (seen == before && to[i] > 1) {
      if (to[i] % ranks != 0) return std::nullopt;
      return static_cast<int64_t>(i);
    }
    seen *= to[i];
    if (seen > before) return std::nullopt;
  }
  return std::nullopt;
}

// Sizes with the one that is -1 worked out.
std::vector<int64_t> Resolved(std::vector<int64_t> sizes, int64_t numel) {
  int64_t known = 1;
  int64_t* open = nullptr;
  for (int64_t& size : sizes) {
    if (size == -1) {
      open = &size;
    } else {
      known *= size;
    }
  }
  if (open != nullptr && known > 0) *open = numel / known;
  return sizes;
}

// Returns how a dimension that is merged with those before it is divided: in as
// many groups as there were elements before it. [B, T] divided along T becomes
// [B * T] in B groups.
std::optional<TensorPlacement> Merged(const at::Tensor& whole, int64_t dim,
                                      at::IntArrayRef to, int64_t ranks) {
  int64_t before = 1;
  for (int64_t i = 0; i < dim; ++i) before *= whole.size(i);
  int64_t seen = 1;
  for (size_t i = 0; i < to.size(); seen *= to[i++]) {
    if (seen * to[i] <= before) continue;
    if (before % seen != 0) return std::nullopt;
    const int64_t groups = before / seen;
    if (groups == 1 || to[i] % (groups * ranks) != 0) return std::nullopt;
    return TensorPlacement::Shard(static_cast<int64_t>(i), groups);
  }
  return std::nullopt;
}

// Returns how a view is divided: a dimension of groups stays one, or is split
// in the groups and what each of them has.
std::optional<TensorPlacement> InView(const at::Tensor& whole,
                                      const TensorPlacement& shard,
                                      at::IntArrayRef to, int64_t ranks) {
  std::optional<int64_t> now =
      DimInView(whole.sizes(), shard.dim, to, shard.groups == 1 ? ranks : 1);
  if (shard.groups == 1) {
    return now.has_value() ? TensorPlacement::Shard(*now)
                           : Merged(whole, shard.dim, to, ranks);
  }
  if (!now.has_value()) return std::nullopt;
  const auto at = static_cast<size_t>(*now);
  if (to[at] == whole.size(shard.dim)) {
    return TensorPlacement::Shard(*now, shard.groups);
  }
  if (to[at] != shard.groups || at + 1 >= to.size() ||
      to[at + 1] % ranks != 0) {
    return std::nullopt;
  }
  return TensorPlacement::Shard(*now + 1);
}

bool ViewAs(PlacedCall& call, const std::vector<int64_t>& sizes) {
  const std::optional<TensorPlacement> shard = call.Shard();
  if (!shard.has_value()) return false;
  const at::Tensor whole = call.tensor(0);
  std::vector<int64_t> to = Resolved(sizes, whole.numel());
  const std::optional<TensorPlacement> now =
      InView(whole, *shard, to, call.ranks());
  if (!now.has_value()) return false;
  to[static_cast<size_t>(now->dim)] /= call.ranks();
  return call.Return(PartForUse(whole).reshape(to), *now);
}

bool ViewRule(PlacedCall& call) { return ViewAs(call, call[1].toIntVector()); }

bool FlattenRule(PlacedCall& call) {
  const at::Tensor whole = call.tensor(0);
  const int64_t from = call.Dim(1, whole.dim()), to = call.Dim(2, whole.dim());
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < whole.dim(); ++i) {
    if (i > from && i <= to) {
      sizes.back() *= whole.size(i);
    } else {
      sizes.push_back(whole.size(i));
    }
  }
  return ViewAs(call, sizes);
}

bool UnflattenRule(PlacedCall& call) {
  const at::Tensor whole = call.tensor(0);
  const int64_t at = call.Dim(1, whole.dim());
  std::vector<int64_t> sizes = whole.sizes().vec();
  const std::vector<int64_t> into =
      Resolved(call[2].toIntVector(), whole.size(at));
  sizes.erase(sizes.begin() + at);
  sizes.insert(sizes.begin() + at, into.begin(), into.end());
  return ViewAs(call, sizes);
}

// Runs the operator on the part; it is divided along `dim` afterwards.
bool OnPart(PlacedCall& call, int64_t dim, int64_t groups = 1) {
  call[0] = PartForUse(call.tensor(0));
  return call.RunAs(TensorPlacement::Shard(dim, groups));
}

bool TransposeRule(PlacedCall& call) {
  const std::optional<TensorPlacement> shard = call.Shard();
  if (!shard.has_value() || !call[1].isInt()) return false;
  const int64_t dims = call.tensor(0).dim(), dim = shard->dim;
  const int64_t a = call.Dim(1, dims), b = call.Dim(2, dims);
  return OnPart(call, dim == a ? b : dim == b ? a : dim, shard->groups);
}

bool TRule(PlacedCall& call) {
  const std::optional<TensorPlacement> shard = call.Shard();
  if (!shard.has_value()) return false;
  const int64_t dim = shard->dim;
  return OnPart(call, call.tensor(0).dim() == 2 ? 1 - dim : dim, shard->groups);
}

bool PermuteRule(PlacedCall& call) {
  const std::optional<TensorPlacement> shard = call.Shard();
  if (!shard.has_value()) return false;
  const int64_t dims = call.tensor(0).dim();
  const std::vector<int64_t> order = call[1].toIntVector();
  for (size_t i = 0; i < order.size(); ++i) {
    if ((order[i] < 0 ? order[i] + dims : order[i]) == shard->dim) {
      return OnPart(call, static_cast<int64_t>(i), shard->groups);
    }
  }
  return false;
}

bool UnsqueezeRule(PlacedCall& call) {
  const std::optional<TensorPlacement> shard = call.Shard();
  if (!shard.has_value()) return false;
  const int64_t at = call.Dim(1, call.tensor(0).dim() + 1), dim = shard->dim;
  return OnPart(call, dim >= at ? dim + 1 : dim, shard->groups);
}

bool SqueezeRule(PlacedCall& call) {
  const std::optional<TensorPlacement> shard = call.Shard();
  if (!shard.has_value() || call.size() < 2 || !call[1].isInt()) return false;
  const at::Tensor whole = call.tensor(0);
  const int64_t at = call.Dim(1, whole.dim()), dim = shard->dim;
  if (at == dim) return false;
  const bool goes = whole.size(at) == 1;
  return OnPart(call, goes && dim > at ? dim - 1 : dim, shard->groups);
}

bool ExpandRule(PlacedCall& call) {
  const std::optional<int64_t> dim = call.Divided();
  if (!dim.has_value()) return false;
  const at::Tensor whole = call.tensor(0);
  std::vector<int64_t> sizes = call[1].toIntVector();
  const int64_t now = *dim + static_cast<int64_t>(sizes.size()) - whole.dim();
  if (now < 0) return false;
  int64_t& size = sizes[static_cast<size_t>(now)];
  if (size != -1 && size != whole.size(*dim)) return false;
  if (size != -1) size /= call.ranks();
  call[1] = sizes;
  return OnPart(call, now);
}

// Computes operators that read along a dimension, argument 1, which the
// result has, too.
bool AlongRule(PlacedCall& call) {
  const std::optional<TensorPlacement> shard = call.Shard();
  if (!shard.has_value() || !call[1].isInt()) return false;
  if (call.Dim(1, call.tensor(0).dim()) == shard->dim) return false;
  return OnPart(call, shard->dim, shard->groups);
}

// Computes the same where the result lacks that dimension.
bool SelectRule(PlacedCall& call) {
  const std::optional<TensorPlacement> shard = call.Shard();
  if (!shard.has_value() || !call[1].isInt()) return false;
  const int64_t at = call.Dim(1, call.tensor(0).dim()), dim = shard->dim;
  if (at == dim) return false;
  return OnPart(call, dim > at ? dim - 1 : dim, shard->groups);
}

// In how many equal parts a call of split or chunk divides a dimension of that
// size; 0: in others.
int64_t EqualParts(PlacedCall& call, int64_t size) {
  if (call[1].isIntList()) {
    const std::vector<int64_t> sizes = call[1].toIntVector();
    for (const int64_t each : sizes) {
      if (each != sizes[0]) return 0;
    }
    return static_cast<int64_t>(sizes.size());
  }
  const bool chunks = call.op().schema().name() == "aten::chunk";
  const int64_t by = call[1].toInt();
  if (by <= 0 || size % by != 0) return 0;
  return chunks ? by : size / by;
}

// The groups of a dimension, each divided.
bool SplitGroups(PlacedCall& call, const TensorPlacement& shard) {
  const at::Tensor whole = call.tensor(0);
  if (EqualParts(call, whole.size(shard.dim)) != shard.groups) return false;
  std::vector<at::Tensor> parts =
      PartForUse(whole).chunk(shard.groups, shard.dim);
  for (at::Tensor& part : parts) {
    part = call.Made(part, TensorPlacement::Shard(shard.dim));
  }
  return call.ReturnList(std::move(parts));
}

// Computes operators that give a list of tensors; argument 2 is the dimension.
bool SplitRule(PlacedCall& call) {
  const std::optional<TensorPlacement> shard = call.Shard();
  if (!shard.has_value()) return false;
  if (call.Dim(2, call.tensor(0).dim()) == shard->dim) {
    return shard->groups > 1 && SplitGroups(call, *shard);
  }
  call[0] = PartForUse(call.tensor(0));
  call.Run();
  std::vector<at::Tensor> parts = call[0].toTensorVector();
  for (at::Tensor& part : parts) part = call.Made(part, *shard);
  call[0] = parts;
  return true;
}

bool UnbindRule(PlacedCall& call) {
  const std::optional<int64_t> dim = call.Divided();
  if (!dim.has_value() || !call[1].isInt()) return false;
  const int64_t at = call.Dim(1, call.tensor(0).dim());
  if (at == *dim) return false;
  std::vector<at::Tensor> parts = PartForUse(call.tensor(0)).unbind(at);
  for (at::Tensor& part : parts) {
    part = call.Made(part, TensorPlacement::Shard(*dim > at ? *dim - 1 : *dim));
  }
  return call.ReturnList(std::move(parts));
}

// cat and stack, along a dimension that is not divided.
bool CatRule(PlacedCall& call) {
  std::vector<at::Tensor> tensors = call[0].toTensorVector();
  std::optional<int64_t> dim;
  for (const at::Tensor& each : tensors) {
    dim = DividedDim(each);
    if (dim.has_value()) break;
  }
  if (!dim.has_value()) return false;
  const bool stacks = call.op().schema().name() == "aten::stack";
  for (const at::Tensor& each : tensors) {
    if (each.dim() != tensors[0].dim()) return false;  // an empty one
  }
  const int64_t at = call.Dim(1, tensors[0].dim() + (stacks ? 1 : 0));
  if (!stacks && at == *dim) return false;
  for (at::Tensor& each : tensors) each = PartAs(each, *dim, call.group());
  call[0] = tensors;
  return call.RunAs(
      TensorPlacement::Shard(stacks && *dim >= at ? *dim + 1 : *dim));
}

}  // namespace

std::vector<NamedRule> ViewRules() {
  return {{"aten::view.", &ViewRule},
          {"aten::_unsafe_view", &ViewRule},
          {"aten::reshape", &ViewRule},
          {"aten::flatten.using_ints", &FlattenRule},
          {"aten::unflatten.int", &UnflattenRule},
          {"aten::transpose.int", &TransposeRule},
          {"aten::t", &TRule},
          {"aten::permute", &PermuteRule},
          {"aten::unsqueeze", &UnsqueezeRule},
          {"aten::squeeze.dim", &SqueezeRule},
          {"aten::expand", &ExpandRule},
          {"aten::slice.Tensor", &AlongRule},
          {"aten::narrow", &AlongRule},
          {"aten::cumsum", &AlongRule},
          {"aten::select.int", &SelectRule},
          {"aten::split.Tensor", &SplitRule},
          {"aten::split_with_sizes", &SplitRule},
          {"aten::chunk", &SplitRule},
          {"aten::unbind.int", &UnbindRule},
          {"aten::cat", &CatRule},
          {"aten::stack", &CatRule}};
}

}  // namespace tessera
