#include "optim/sharded_step.h"

#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/view_as_complex.h"
#include "ATen/ops/zeros.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "c10/core/DeviceGuard.h"
#include "optim/device_kernels.h"
#include "optim/grad_norm.h"
#include "sharding/torch/torch_scope.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

using Flats = std::vector<std::shared_ptr<FlatParameter>>;

// Calls add(segment, first), as NormSum::Add, for this rank's shard of a flat's
// gradients, also where it owns more: so each element counts on one rank.
template <typename Add>
void AddFlat(const FlatParameter& flat, const FlatGradient& gradient,
             const Add& add) {
  const at::Tensor owned = gradient.owned();
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
    add(part, first);
  }
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
    return ReplicasDiffer(static_cast<int64_t>(begin),
                          static_cast<int64_t>(group_size));
  }
  return *first;
}

// The norm of the undivided gradients, the same on all ranks.
absl::StatusOr<double> GlobalNorm(const Flats& flats,
                                  const Gradients& gradients, double norm_type,
                                  Communicator* comm) {
  NormSum mine(norm_type);
  TESSERA_RETURN_IF_ERROR(CatchTorch("gradient norm", [&]() -> absl::Status {
    TorchScope scope;
    for (size_t u = 0; u < flats.size(); ++u) {
      const FlatGradient& gradient = gradients.of(u);
      if (!gradient.has_step_gradient()) continue;
      TESSERA_ASSIGN_OR_RETURN(const Raised raised, gradient.Raise());
      AddFlat(*flats[u], gradient,
              [&](const at::Tensor& segment, int64_t first) {
                mine.Add(segment, first);
              });
    }
    mine.Finish();
    return absl::OkStatus();
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

// The device's, if they can do what the step needs; the same on all ranks,
// since it decides which collective there is. Null: the host finds the norm.
const DeviceKernels* NormKernels(const Flats& flats, double norm_type) {
  if (flats.empty()) return nullptr;
  const DeviceKernels* const kernels =
      DeviceKernelsOf(flats[0]->device().type());
  if (kernels == nullptr) return nullptr;
  for (const auto& flat : flats) {
    const bool complex = flat->parameters()[0].tensor.is_complex();
    const at::ScalarType dtype = flat->master_dtype();
    if (!kernels->HasNorm(norm_type,
                          complex ? at::toComplexType(dtype) : dtype)) {
      return nullptr;
    }
  }
  return kernels;
}

// What FinishNorm makes of the norm, float64 [kStepScalars] on the device.
absl::StatusOr<at::Tensor> ScalarsOnDevice(const DeviceKernels& kernels,
                                           const Flats& flats,
                                           const Gradients& gradients,
                                           const NormFinish& finish,
                                           Communicator* comm) {
  const at::Device device = flats[0]->device();
  const c10::DeviceGuard guard(device);
  at::Tensor mine, all, scalars;
  TESSERA_RETURN_IF_ERROR(CatchTorch("gradient norm", [&]() -> absl::Status {
    TorchScope scope;
    const auto words = at::TensorOptions(at::kLong).device(device);
    mine = at::zeros({kNormWords}, words);
    for (size_t u = 0; u < flats.size(); ++u) {
      const FlatGradient& gradient = gradients.of(u);
      if (!gradient.has_step_gradient()) continue;
      TESSERA_ASSIGN_OR_RETURN(const Raised raised, gradient.Raise());
      AddFlat(*flats[u], gradient,
              [&](const at::Tensor& segment, int64_t first) {
                kernels.AddToNorm(segment, first, finish.p, mine);
              });
    }
    all = at::empty({comm->world_size() * kNormWords}, words);
    return absl::OkStatus();
  }));
  TESSERA_RETURN_IF_ERROR(
      comm->AllGather(mine, all, CommTag{"gradient norm"}).Wait());
  TESSERA_RETURN_IF_ERROR(CatchTorch("gradient norm", [&] {
    TorchScope scope;
    scalars = at::empty({kStepScalars}, mine.options().dtype(at::kDouble));
    kernels.FinishNorm(all, finish, scalars);
  }));
  return scalars;
}

// By the norm: what the gradients are multiplied with, and what becomes of the
// step.
struct Decision {
  GradientFactor factor;
  StepOutcome outcome;
};

absl::StatusOr<Decision> DecideOnHost(const Flats& flats,
                                      const Gradients& gradients,
                                      double divisor,
                                      const ShardedStepOptions& options,
                                      Communicator* comm) {
  const double inverse = 1 / divisor;
  TESSERA_ASSIGN_OR_RETURN(
      const double raw, GlobalNorm(flats, gradients, options.norm_type, comm));
  ShardedStepResult result;
  result.grad_norm = raw * inverse;
  result.skipped = options.skip_on_overflow && !std::isfinite(raw);
  if (result.skipped) return Decision{inverse, StepOutcome(result)};
  const double clip = ClipCoefficient(result.grad_norm, options.max_norm);
  result.clipped_norm = result.grad_norm * clip;
  return Decision{inverse * clip, StepOutcome(result)};
}

absl::StatusOr<Decision> DecideOnDevice(const DeviceKernels& kernels,
                                        const Flats& flats,
                                        const Gradients& gradients,
                                        double divisor,
                                        const ShardedStepOptions& options,
                                        Communicator* comm) {
  NormFinish finish;
  finish.p = options.norm_type;
  finish.group_size = flats[0]->communicator()->world_size();
  finish.divisor = divisor;
  finish.max_norm = options.max_norm;
  finish.skip_on_overflow = options.skip_on_overflow;
  TESSERA_ASSIGN_OR_RETURN(
      const at::Tensor scalars,
      ScalarsOnDevice(kernels, flats, gradients, finish, comm));
  return CatchTorch("gradient norm", [&] {
    return Decision{GradientFactor(scalars, options.skip_on_overflow),
                    StepOutcome(scalars, finish, comm->world_size())};
  });
}

absl::StatusOr<Decision> Decide(const Flats& flats, const Gradients& gradients,
                                double divisor,
                                const ShardedStepOptions& options,
                                Communicator* comm) {
  if (options.max_norm <= 0 && !options.skip_on_overflow &&
      !options.report_norm) {
    return Decision{1 / divisor, StepOutcome(ShardedStepResult())};
  }
  if (const auto* kernels = NormKernels(flats, options.norm_type)) {
    return DecideOnDevice(*kernels, flats, gradients, divisor, options, comm);
  }
  return DecideOnHost(flats, gradients, divisor, options, comm);
}

// Owners' new values reach the others, and libtorch learns of the change: a
// graph that saved the old values fails in backward, as in plain libtorch.
absl::Status Publish(FlatParameter* flat, const FlatGradient& gradient,
                     bool working_written, const CommFuture& updated) {
  TESSERA_RETURN_IF_ERROR(flat->PublishOwned(working_written, updated));
  const auto& params = flat->parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    if (gradient.has_gradient(i)) {
      torch::autograd::impl::bump_version(params[i].tensor);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<StepOutcome> StepShards(
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    Gradients* gradients, double divisor, const ShardedStepOptions& options,
    ShardedOptimizer* optimizer, Communicator* comm) {
  TESSERA_RETURN_IF_ERROR(CatchTorch(
      "optimizer states", [&] { return optimizer->Prepare(*gradients); }));
  TESSERA_ASSIGN_OR_RETURN(Decision decision,
                           Decide(flats, *gradients, divisor, options, comm));
  StepOutcome& outcome = decision.outcome;
  if (!outcome.pending() && outcome.Take()->skipped) return std::move(outcome);
  TESSERA_RETURN_IF_ERROR(optimizer->Step(
      gradients, decision.factor,
      [&](size_t u, bool working_written, const CommFuture& updated) {
        return Publish(flats[u].get(), gradients->of(u), working_written,
                       updated);
      }));
  return std::move(outcome);
}

}  // namespace tessera
