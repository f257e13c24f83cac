#include "optim/step_decision.h"

#include <cmath>
#include <limits>

#include "ATen/ops/empty.h"
#include "ATen/ops/zeros.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "base/trace/trace.h"
#include "c10/core/DeviceGuard.h"
#include "optim/device_kernels.h"
#include "optim/gradients/clipping.h"
#include "optim/gradients/gradient_norms.h"
#include "optim/gradients/owned_gradients.h"
#include "optim/norm/grad_norm.h"

namespace tessera {
namespace {

using Flats = std::vector<std::shared_ptr<FlatParameter>>;

constexpr char kNorm[] = "gradient norm";

// Parameters whose gradients have one norm: the first set is of groups without
// a maximum of their own, each other of one group with it.
struct ClipSets {
  std::vector<double> max_norms;  // of each
  std::vector<int> of_group;      // the set of each group
  std::vector<int> of_parameter;  // and of each parameter of the model
};

ClipSets SetsOf(const ShardedStepOptions& options,
                const ParameterGroups& groups) {
  ClipSets sets;
  sets.max_norms = {options.max_norm};
  sets.of_group.resize(groups.options.size());
  for (size_t g = 0; g < options.group_max_norms.size(); ++g) {
    if (!options.group_max_norms[g].has_value()) continue;
    sets.of_group[g] = static_cast<int>(sets.max_norms.size());
    sets.max_norms.push_back(*options.group_max_norms[g]);
  }
  for (const int group : groups.of) {
    sets.of_parameter.push_back(sets.of_group[static_cast<size_t>(group)]);
  }
  return sets;
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
    for (const at::ScalarType dtype :
         {flat->gradient_dtype(), flat->kept_gradient_dtype()}) {
      if (!kernels->HasNorm(norm_type,
                            complex ? at::toComplexType(dtype) : dtype)) {
        return nullptr;
      }
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
  TESSERA_RETURN_IF_ERROR(CatchTorch(kNorm, [&] {
    TorchScope scope;
    mine = at::zeros({kNormWords}, at::TensorOptions(at::kLong).device(device));
    all = at::empty({comm->world_size() * kNormWords}, mine.options());
  }));
  std::vector<NormPart> parts;
  TESSERA_RETURN_IF_ERROR(VisitShards(
      kNorm, flats, gradients,
      [&](const FlatGradient& gradient, const GradientParts& visited) {
        for (const GradientPart& part : visited) {
          parts.push_back({part.values, part.first});
        }
        // What is raised is there for this unit alone.
        if (gradient.elsewhere() == nullptr) return;
        kernels.AddToNorm(parts, finish.p, mine);
        parts.clear();
      }));
  TESSERA_RETURN_IF_ERROR(CatchTorch(kNorm, [&] {
    TorchScope scope;
    kernels.AddToNorm(parts, finish.p, mine);
  }));
  TESSERA_RETURN_IF_ERROR(
      comm->AllGather(mine, all, CommTag{kNorm}.For(WaitReason::kAgreement))
          .Wait());
  TESSERA_RETURN_IF_ERROR(CatchTorch(kNorm, [&] {
    TorchScope scope;
    scalars = at::empty({kStepScalars}, mine.options().dtype(at::kDouble));
    kernels.FinishNorm(all, finish, scalars);
  }));
  return scalars;
}

// Decides the step on the host. Each set has its own clipping; if there are
// several, the gradients are multiplied by their factors here.
absl::StatusOr<StepDecision> DecideOnHost(const Flats& flats,
                                          Gradients* gradients, double divisor,
                                          const ShardedStepOptions& options,
                                          ShardedOptimizer* optimizer,
                                          Communicator* comm) {
  const double inverse = 1 / divisor;
  const ClipSets sets = SetsOf(options, optimizer->groups());
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<double> raw,
      GradientNorms(flats, *gradients, sets.of_parameter, sets.max_norms.size(),
                    options.norm_type, comm));
  std::vector<double> clips;
  std::vector<ShardedStepResult::Norms> norms;
  ShardedStepResult result;
  for (size_t i = 0; i < raw.size(); ++i) {
    const double norm = raw[i] * inverse;
    clips.push_back(ClipCoefficient(norm, sets.max_norms[i]));
    norms.push_back({norm, norm * clips[i]});
    result.skipped =
        result.skipped || (options.skip_on_overflow && !std::isfinite(raw[i]));
  }
  if (result.skipped) {
    for (auto& each : norms)
      each.clipped_norm = std::numeric_limits<double>::quiet_NaN();
  }
  result.grad_norm = norms[0].grad_norm;
  result.clipped_norm = norms[0].clipped_norm;
  const bool several = sets.max_norms.size() > 1;
  for (size_t g = 0; several && g < sets.of_group.size(); ++g) {
    const auto set = static_cast<size_t>(sets.of_group[g]);
    result.groups.push_back(set == 0 ? ShardedStepResult::Norms() : norms[set]);
  }
  if (result.skipped) return StepDecision{inverse, StepOutcome(result)};
  if (!several) return StepDecision{inverse * clips[0], StepOutcome(result)};
  optimizer->NoteChangedGradients();
  TESSERA_RETURN_IF_ERROR(
      MultiplyGradients(flats, clips, sets.of_parameter, gradients));
  return StepDecision{inverse, StepOutcome(result)};
}

absl::StatusOr<StepDecision> DecideOnDevice(const DeviceKernels& kernels,
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
  return CatchTorch(kNorm, [&] {
    return StepDecision{GradientFactor(scalars, options.skip_on_overflow),
                        StepOutcome(scalars, finish, comm->world_size())};
  });
}

}  // namespace

absl::StatusOr<StepDecision> DecideStep(const Flats& flats,
                                        Gradients* gradients, double divisor,
                                        const ShardedStepOptions& options,
                                        ShardedOptimizer* optimizer,
                                        Communicator* comm) {
  if (options.max_norm <= 0 && !options.skip_on_overflow &&
      !options.report_norm && options.group_max_norms.empty()) {
    return StepDecision{1 / divisor, StepOutcome(ShardedStepResult())};
  }
  const TraceScope trace(TraceTrack::kStep, "norm and clipping");
  const DeviceKernels* const kernels = NormKernels(flats, options.norm_type);
  if (kernels != nullptr && options.group_max_norms.empty() &&
      !optimizer->is_custom()) {
    return DecideOnDevice(*kernels, flats, *gradients, divisor, options, comm);
  }
  return DecideOnHost(flats, gradients, divisor, options, optimizer, comm);
}

}  // namespace tessera
