// What a configuration and EngineOptions mean for the layers below. What a
// section says in so many words is read from it.
#ifndef ENGINE_BUILD_SETTINGS_H_
#define ENGINE_BUILD_SETTINGS_H_

#include <optional>

#include "ATen/core/Tensor.h"
#include "base/torch/deterministic.h"
#include "engine/api/engine_types.h"
#include "engine/build/buffer_sync.h"
#include "engine/build/recompute_choice.h"
#include "engine/build/tiers.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/schedule/loss_scaler.h"
#include "optim/sharded_step.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/schedule.h"
#include "sharding/gradient/gradients.h"
#include "sharding/partition/flat_plan.h"
#include "sharding/partition/partition.h"
#include "sharding/recompute/recomputed_units.h"

namespace tessera {

namespace proto {
class Config;
class ZeroOptimization;
}  // namespace proto

struct Settings {
  PartitionOptions partition;
  FlatOptions flats;  // sharded_parameters as the stage says
  ScheduleOptions schedule;
  GradientOptions gradients;
  ShardedStepOptions step;
  std::optional<OptimizerOptions> optimizer;     // of the first group
  std::optional<OptimizerOptions> muon;          // of matrices, with Muon
  std::optional<LossScalerOptions> loss_scaler;  // with fp16
  // Absent: parameters and buffers stay as they are.
  std::optional<at::ScalarType> param_dtype;
  std::optional<at::ScalarType> buffer_dtype;
  // Masters of 16 bits of the parameters that compute with as many.
  bool narrow_masters = false;
  // Float32 masters beside bfloat16 parameters are kept as remainders.
  bool remainder_masters = false;
  // Dtype of sums over ranks, for parameters of at most 32 bits.
  std::optional<at::ScalarType> reduce_dtype;
  // Dtype of steps' gradients, for parameters of at most 32 bits.
  std::optional<at::ScalarType> gradient_dtype;
  // Steps' gradients stay in the sums' dtype where they are not changed.
  bool narrow_gradients = false;
  // Dtype of autocast scopes (AutocastScope).
  std::optional<at::ScalarType> autocast_dtype;
  OffloadOptions offload;      // at stage 3
  RecomputeChoice recomputed;  // without units: nothing is
  RecomputeOptions recompute;  // without a store
  ActivationOffload activations;
  bool cast_inputs = false;
  bool check_writes = false;
  bool shard_alone = false;                // one rank gathers what it has
  std::optional<Determinism> determinism;  // on devices; absent: off
  std::optional<BufferSync::Values> buffer_sync;  // absent: local
  int world_size = 1;
  int shard_group_size = 1;  // the world size where there are no replicas

  // Returns over how many ranks flats are laid out: where nothing is sharded
  // all are one group.
  int group_size(int stage) const {
    return stage == 0 ? world_size : shard_group_size;
  }
};

// Translates a configuration, except for what SetOverlap sets. REQUIRES:
// `config` is resolved (config/config.h). LOCAL.
Settings SettingsOf(const proto::Config& config, const EngineOptions& options,
                    int world_size);

// Returns the disk that a resolved configuration offloads to, or may offload
// to.
std::optional<SwapOptions> DiskOf(const proto::Config& config);

// Sets what runs while the model computes: apart, since the stage may be known
// late.
void SetOverlap(const proto::ZeroOptimization& zero, int stage,
                Settings* settings);

// Returns the dtype in which operators compute with `parameter`.
at::ScalarType WorkingDtype(const Settings& settings,
                            const NamedParameter& parameter);

// Returns the options of a flat at a stage, without the reshard group.
FlatParameterOptions FlatParameterOptionsOf(const Settings& settings,
                                            const FlatPlan& flat, int stage);

}  // namespace tessera
#endif  // ENGINE_BUILD_SETTINGS_H_
