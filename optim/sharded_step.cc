#include "optim/sharded_step.h"

#include <cmath>
#include <optional>
#include <string>

#include "ATen/ops/view_as_complex.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "optim/grad_norm.h"
#include "sharding/torch/torch_scope.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

// Adds this rank's shard of a flat's gradients, also where it owns more: so
// each element counts on one rank.
void AddFlat(const FlatParameter& flat, const FlatGradient& gradient,
             NormSum* sum) {
  const at::Tensor owned = gradient.owned();
  if (!owned.defined()) return;
  const Range shard = flat.layout().shard(flat.communicator()->rank());
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    const FlatParameter::Parameter& p = flat.parameters()[i];
    const Range mine = Intersect(p.range, shard);
    if (!gradient.has_gradient(i) || mine.empty()) continue;
    at::Tensor part =
        owned.narrow(0, mine.begin - flat.owned().begin, mine.numel());
    int64_t first = p.storage_offset + mine.begin - p.range.begin;
    if (p.tensor.is_complex()) {  // their parts stay together
      part = at::view_as_complex(part.view({-1, 2}));
      first /= 2;
    }
    sum->Add(part, first);
  }
}

std::string Ranks(size_t begin, size_t end) {
  return end - begin == 1 ? absl::StrCat("rank ", begin)
                          : absl::StrCat("ranks ", begin, " to ", end - 1);
}

// The sum over the first `group_size` ranks, a shard group, which the others
// must be replicas of.
absl::StatusOr<NormSum> SumOfGroup(const std::vector<std::string>& all,
                                   size_t group_size, double norm_type) {
  std::optional<NormSum> first;
  for (size_t begin = 0; begin < all.size(); begin += group_size) {
    NormSum sum(norm_type);
    for (size_t rank = begin; rank < begin + group_size; ++rank) {
      TESSERA_RETURN_IF_ERROR(sum.Merge(all[rank]));
    }
    if (!first.has_value()) first = sum;
    if (sum.Serialize() == first->Serialize()) continue;
    return absl::InternalError(absl::StrCat(
        "Step: the reduced gradients of ", Ranks(begin, begin + group_size),
        " are not those of ", Ranks(0, group_size),
        ", whose replicas they are (sharding.shard_group_size ", group_size,
        "): a collective gave other bits on other ranks; go on from a "
        "checkpoint"));
  }
  return *first;
}

// The norm of the undivided gradients, the same on all ranks.
absl::StatusOr<double> GlobalNorm(
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    const Gradients& gradients, double norm_type, Communicator* comm) {
  NormSum mine(norm_type);
  TESSERA_RETURN_IF_ERROR(CatchTorch("gradient norm", [&] {
    TorchScope scope;
    for (size_t u = 0; u < flats.size(); ++u) {
      AddFlat(*flats[u], gradients.of(u), &mine);
    }
    mine.Finish();
  }));
  TESSERA_ASSIGN_OR_RETURN(
      const auto all,
      comm->AllGatherStrings(mine.Serialize(), CommTag{"gradient norm"}));
  const int group_size = flats[0]->communicator()->world_size();
  TESSERA_ASSIGN_OR_RETURN(
      const NormSum sum,
      SumOfGroup(all, static_cast<size_t>(group_size), norm_type));
  return sum.Norm();
}

// Owners' new values reach the others, and libtorch learns of the change: a
// graph that saved the old values fails in backward, as in plain libtorch.
absl::Status Publish(FlatParameter* flat, const FlatGradient& gradient,
                     bool working_written) {
  TESSERA_RETURN_IF_ERROR(flat->PublishOwned(working_written));
  const auto& params = flat->parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    if (gradient.has_gradient(i)) {
      torch::autograd::impl::bump_version(params[i].tensor);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ShardedStepResult> StepShards(
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    const Gradients& gradients, double divisor,
    const ShardedStepOptions& options, AdamW* optimizer, Communicator* comm) {
  TESSERA_RETURN_IF_ERROR(CatchTorch(
      "optimizer states", [&] { return optimizer->Prepare(gradients); }));
  ShardedStepResult result;
  const double inverse = 1 / divisor;
  double factor = inverse;
  if (options.max_norm > 0 || options.skip_on_overflow || options.report_norm) {
    TESSERA_ASSIGN_OR_RETURN(
        const double raw,
        GlobalNorm(flats, gradients, options.norm_type, comm));
    result.grad_norm = raw * inverse;
    result.skipped = options.skip_on_overflow && !std::isfinite(raw);
    if (result.skipped) return result;
    const double clip = ClipCoefficient(result.grad_norm, options.max_norm);
    result.clipped_norm = result.grad_norm * clip;
    factor = inverse * clip;
  }
  TESSERA_RETURN_IF_ERROR(
      optimizer->Step(gradients, factor, [&](size_t u, bool working_written) {
        return Publish(flats[u].get(), gradients.of(u), working_written);
      }));
  return result;
}

}  // namespace tessera
