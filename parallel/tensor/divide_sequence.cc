#include "parallel/tensor/divide_sequence.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/torch_guard.h"
#include "parallel/tensor/placed.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

// Returns null if no parameter of the module is a copy.
std::shared_ptr<PartGroup> GroupOfCopies(const torch::nn::Module& module) {
  for (const at::Tensor& parameter : module.parameters()) {
    const Placed* const placed = PlacedOf(parameter);
    if (placed == nullptr) continue;
    return placed->placement.kind == TensorPlacement::kCopy ? placed->group
                                                            : nullptr;
  }
  return nullptr;
}

}  // namespace

at::Tensor DivideSequence(const torch::nn::Module& module,
                          const at::Tensor& whole, int64_t dim) {
  const auto group = GroupOfCopies(module);
  if (group == nullptr || PlacedOf(whole) != nullptr) return whole;
  const int64_t at = dim < 0 ? dim + whole.dim() : dim;
  if (at < 0 || at >= whole.dim() || whole.size(at) % group->size() != 0) {
    ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
        "DivideSequence: dimension ", dim, " of a tensor [",
        absl::StrJoin(whole.sizes(), ", "), "] is to be divided by ",
        group->size(),
        " ranks (sequence_parallel_size), and cannot be: fill sequences up to "
        "a multiple, and leave what was added out of the loss")));
  }
  return Divide(whole, TensorPlacement::Shard(at), group);
}

}  // namespace tessera
