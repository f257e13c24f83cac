#include "optim/step_decision.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ATen/ops/empty.h"
#include "ATen/ops/maximum.h"
#include "ATen/ops/stack.h"
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

bool NeedsNorm(const ShardedStepOptions& options) {
  return options.max_norm > 0 || options.skip_on_overflow ||
         options.report_norm || !options.group_max_norms.empty();
}

std::vector<NormPart> NormPartsOf(const GradientParts& gradients) {
  std::vector<NormPart> parts;
  for (const GradientPart& part : gradients) {
    parts.push_back({part.values, part.first});
  }
  return parts;
}

at::Tensor ZeroNorm(at::Device device) {
  return at::zeros({kNormWords}, at::TensorOptions(at::kLong).device(device));
}

// Whether what was measured is a part of the norm. Parameters that have no
// gradient beside others that have one are zeros.
bool IsMeasured(const FlatGradient& gradient) {
  const std::vector<bool> has = gradient.has_gradient();
  return gradient.elsewhere() != nullptr && gradient.measured().defined() &&
         std::find(has.begin(), has.end(), true) != has.end();
}

// Adds units' sums to `sum`. Digits may pass 2^32: FinishNorm carries.
void AddMeasured(const std::vector<at::Tensor>& measured,
                 const at::Tensor& sum) {
  if (measured.empty()) return;
  const at::Tensor all = at::stack(measured);
  sum.narrow(0, 0, kNormDigits).add_(all.narrow(1, 0, kNormDigits).sum(0));
  at::Tensor greatest = sum.narrow(0, kNormDigits, 1);
  greatest.copy_(at::maximum(greatest, all.narrow(1, kNormDigits, 1).amax(0)));
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
    mine = ZeroNorm(device);
    all = at::empty({comm->world_size() * kNormWords}, mine.options());
  }));
  std::vector<NormPart> parts;
  std::vector<at::Tensor> measured;
  TESSERA_RETURN_IF_ERROR(VisitShards(
      kNorm, flats, gradients,
      [&](const FlatGradient& gradient, const GradientParts& visited) {
        const std::vector<NormPart> more = NormPartsOf(visited);
        parts.insert(parts.end(), more.begin(), more.end());
        // What is raised is there for this unit alone.
        if (gradient.elsewhere() == nullptr) return;
        kernels.AddToNorm(parts, finish.p, mine);
        parts.clear();
      },
      [&](const FlatGradient& gradient) {
        const bool known = IsMeasured(gradient);
        if (known) measured.push_back(gradient.measured());
        return known;
      }));
  TESSERA_RETURN_IF_ERROR(CatchTorch(kNorm, [&] {
    TorchScope scope;
    kernels.AddToNorm(parts, finish.p, mine);
    AddMeasured(measured, mine);
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
  finish.group_size = CopiesOver(*flats[0], *comm).neighbours;
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

// As NormKernels, of a step with these options; null: the host decides it.
const DeviceKernels* KernelsOf(const Flats& flats,
                               const ShardedStepOptions& options,
                               const ShardedOptimizer& optimizer) {
  const bool on_host =
      !options.group_max_norms.empty() || optimizer.is_custom();
  return on_host ? nullptr : NormKernels(flats, options.norm_type);
}

}  // namespace

void MeasureBeforeLeaving(const Flats& flats, const ShardedStepOptions& options,
                          const ShardedOptimizer& optimizer,
                          Gradients* gradients) {
  const DeviceKernels* const kernels = KernelsOf(flats, options, optimizer);
  if (kernels == nullptr || !NeedsNorm(options) ||
      options.changes_gradients()) {
    return;
  }
  for (size_t u = 0; u < flats.size(); ++u) {
    gradients->of(u).SetMeasure(
        [kernels, p = options.norm_type](const FlatGradient& gradient,
                                         const at::Tensor& owned) {
          TorchScope scope;
          const c10::DeviceGuard guard(owned.device());
          at::Tensor sum = ZeroNorm(owned.device());
          kernels->AddToNorm(NormPartsOf(ShardsOf(gradient, owned)), p, sum);
          return sum;
        });
  }
}

absl::StatusOr<StepDecision> DecideStep(const Flats& flats,
                                        Gradients* gradients, double divisor,
                                        const ShardedStepOptions& options,
                                        ShardedOptimizer* optimizer,
                                        Communicator* comm) {
  if (!NeedsNorm(options)) {
    return StepDecision{1 / divisor, StepOutcome(ShardedStepResult())};
  }
  const TraceScope trace(TraceTrack::kStep, "norm and clipping");
  const DeviceKernels* const kernels = KernelsOf(flats, options, *optimizer);
  if (kernels != nullptr) {
    return DecideOnDevice(*kernels, flats, *gradients, divisor, options, comm);
  }
  return DecideOnHost(flats, gradients, divisor, options, optimizer, comm);
}

}  // namespace tessera
