#include "engine/plan/replay/planned_flat.h"

#include "optim/kernels/shaped_states.h"
#include "sharding/copy/flat_description.h"

namespace tessera {

absl::string_view PlanKindName(PlanKind kind) {
  switch (kind) {
    case PlanKind::kParameters:
      return "parameters";
    case PlanKind::kMasters:
      return "masters";
    case PlanKind::kOptimizer:
      return "optimizer";
    case PlanKind::kGathered:
      return "gathered";
    case PlanKind::kGradients:
      return "gradients";
    case PlanKind::kActivations:
      return "activations";
    case PlanKind::kKernels:
      return "kernels";
  }
  return "";
}

PlannedFlat PlannedFlatOf(const Settings& settings,
                          const OptimizerOptions* optimizer,
                          const FlatPlan& flat, int stage) {
  const FlatParameterOptions options =
      FlatParameterOptionsOf(settings, flat, stage);
  // At stage 0 all ranks are one group, but nothing is cut.
  const FlatLayout layout =
      LayoutOf(flat.parameters, settings.shard_group_size);
  const auto bytes = [](at::ScalarType dtype) {
    return static_cast<int64_t>(c10::elementSize(dtype));
  };
  const at::ScalarType working = WorkingDtypeOf(flat.parameters, options);
  const at::ScalarType own = c10::toRealValueType(flat.dtype);
  const at::ScalarType master = MasterDtypeOf(own, options);
  PlannedFlat planned;
  planned.name = flat.name;
  planned.whole_numel = layout.whole_numel();
  planned.shard_numel = layout.shard_numel();
  planned.working_bytes = bytes(working);
  planned.master_bytes =
      flat.trainable && working != master ? bytes(master) : 0;
  const at::ScalarType sums = options.reduce_dtype.value_or(working);
  const at::ScalarType gradient = GradientDtypeOf(master, options);
  planned.reduce_bytes = bytes(sums);
  planned.gradient_bytes = bytes(gradient);
  planned.local_bytes = bytes(at::promoteTypes(sums, gradient));
  planned.keeps_sums = sums == gradient;
  planned.state_bytes = bytes(StepDtypeOf(master));
  planned.stepped_bytes = bytes(master);
  if (optimizer != nullptr) {
    planned.optimizer_block_bytes =
        StateBytesOf(*optimizer, planned.state_bytes, 64);
    planned.shaped_state_bytes =
        planned.state_bytes *
        ShapedNumelOf(FormulaOf(*optimizer), flat.parameters);
  }
  planned.trained = flat.trainable;
  planned.sharded_parameters = options.stage.sharded_parameters;
  planned.alone = settings.shard_group_size == 1;
  planned.sharded_gradients = options.stage.sharded_gradients;
  planned.sharded_optimizer = options.stage.sharded_optimizer;
  return planned;
}

PlannedBytes BytesBetweenSteps(const PlannedFlat& flat, bool has_optimizer,
                               bool shared) {
  PlannedBytes bytes;
  const bool cut = flat.sharded_parameters || shared;
  if (!flat.parameters_elsewhere) {
    bytes.Add(PlanKind::kParameters,
              (cut ? flat.shard_numel : flat.whole_numel) * flat.working_bytes);
  }
  if (flat.trained && has_optimizer) {
    bytes.Add(PlanKind::kOptimizer, flat.shaped_state_bytes);
  }
  if (!flat.trained || flat.states_elsewhere) return bytes;
  bytes.Add(PlanKind::kMasters, flat.owned_numel() * flat.master_bytes);
  if (has_optimizer) {
    bytes.Add(PlanKind::kOptimizer,
              flat.owned_numel() / 64 * flat.optimizer_block_bytes);
  }
  return bytes;
}

}  // namespace tessera
