#include "engine/plan/replay/planned_flat.h"

#include "optim/kernels/shaped_states.h"
#include "sharding/copy/flat_description.h"

namespace tessera {

namespace {

// `options`: with the tiers of its states.
PlannedFlat PlannedFlatOf(const FlatPlan& flat,
                          const FlatParameterOptions& options,
                          const OptimizerOptions* optimizer, int group_size,
                          bool on_cpu) {
  const FlatLayout layout = LayoutOf(flat.parameters, group_size);
  const auto bytes = [](at::ScalarType dtype) {
    return static_cast<int64_t>(c10::elementSize(dtype));
  };
  const at::ScalarType working = WorkingDtypeOf(flat.parameters, options);
  const at::ScalarType master = MasterDtypeOf(ElementType(flat.dtype), options);
  const at::ScalarType sums = options.reduce_dtype.value_or(working);
  const at::ScalarType gradient = GradientDtypeOf(master, options);
  const at::ScalarType kept = KeptGradientDtypeOf(master, sums, options);
  PlannedFlat planned;
  planned.whole_numel = layout.whole_numel();
  planned.shard_numel = layout.shard_numel();
  planned.working_bytes = bytes(working);
  planned.master_bytes =
      flat.trainable && HasSeparateMasters(flat, options, on_cpu)
          ? bytes(KeptMasterDtypeOf(ElementType(flat.dtype), options))
          : 0;
  planned.reduce_bytes = bytes(sums);
  planned.gradient_bytes = bytes(kept);
  planned.local_bytes = bytes(at::promoteTypes(sums, gradient));
  planned.keeps_sums = sums == kept;
  planned.state_bytes = bytes(StepDtypeOf(master));
  planned.stepped_bytes = bytes(master);
  planned.splits_masters = SplitsMasters(ElementType(flat.dtype), options);
  if (optimizer != nullptr) {
    planned.optimizer_block_bytes =
        StateBytesOf(*optimizer, planned.state_bytes, 64);
    planned.shaped_state_bytes =
        planned.state_bytes *
        ShapedNumelOf(FormulaOf(*optimizer), flat.parameters);
  }
  planned.trained = flat.trainable;
  planned.sharded_parameters = options.stage.sharded_parameters;
  planned.sharded_gradients = options.stage.sharded_gradients;
  planned.sharded_optimizer = options.stage.sharded_optimizer;
  planned.states = options.states_tier;
  planned.parameters = options.parameters_tier;
  planned.gradients = options.gradients_tier;
  planned.alone = group_size == 1 && !options.shard_alone &&
                  options.parameters_tier == Tier::kMemory;
  return planned;
}

}  // namespace

absl::string_view PlanKindName(PlanKind kind) {
  constexpr absl::string_view kNames[kNumPlanKinds] = {
      "parameters", "masters",     "optimizer", "gathered",
      "gradients",  "activations", "kernels"};
  return kNames[static_cast<size_t>(kind)];
}

PlannedFlats PlannedFlatsOf(const Settings& settings,
                            const ParameterGroups& groups,
                            absl::Span<const FlatPlan> flats, int stage,
                            bool on_cpu) {
  PlannedFlats planned;
  std::vector<FlatParameterOptions> options;
  for (const FlatPlan& flat : flats) {
    options.push_back(FlatParameterOptionsOf(settings, flat, stage));
  }
  const int group_size = settings.group_size(stage);
  planned.tiers =
      ChooseTiers(settings.offload, flats, group_size, on_cpu, &options);
  // Buffers for a device's states are on the host.
  if (planned.tiers.any() && on_cpu) {
    planned.stream_bytes =
        StreamBytes(planned.tiers.stream) + planned.tiers.early_bytes;
  }
  for (size_t i = 0; i < flats.size(); ++i) {
    planned.flats.push_back(PlannedFlatOf(flats[i], options[i],
                                          OptimizerOf(groups, flats[i]),
                                          group_size, on_cpu));
  }
  return planned;
}

PlannedBytes BytesBetweenSteps(const PlannedFlat& flat, bool has_optimizer,
                               bool shared) {
  PlannedBytes bytes;
  const bool cut = flat.sharded_parameters || shared;
  if (flat.parameters == Tier::kMemory) {
    bytes.Add(PlanKind::kParameters,
              (cut ? flat.shard_numel : flat.whole_numel) * flat.working_bytes);
  }
  if (flat.trained && has_optimizer) {
    bytes.Add(PlanKind::kOptimizer, flat.shaped_state_bytes);
  }
  if (!flat.trained || flat.states != Tier::kMemory) return bytes;
  bytes.Add(PlanKind::kMasters, flat.owned_numel() * flat.master_bytes);
  if (has_optimizer) {
    bytes.Add(PlanKind::kOptimizer,
              flat.owned_numel() / 64 * flat.optimizer_block_bytes);
  }
  return bytes;
}

}  // namespace tessera
