// EngineParts: what an engine is made of, for all that works on it:
// Engine::Impl makes and ends the parts, Trainer steps them, engine/access
// reads and writes their values. A plain struct, without invariants of its own;
// who writes what stands with each member.
//
// Threads: none; calls of an engine come from one thread at a time.
#ifndef ENGINE_PARTS_ENGINE_PARTS_H_
#define ENGINE_PARTS_ENGINE_PARTS_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/config.pb.h"
#include "engine/parts/settings.h"
#include "engine/setup/buffer_sync.h"
#include "offload/update_stream.h"
#include "optim/loss_scaler.h"
#include "optim/parameter_groups.h"
#include "optim/schedule/lr_schedule.h"
#include "optim/sharded_optimizer.h"
#include "sharding/copy/served_gathers.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/schedule.h"
#include "sharding/gradient/gradients.h"

namespace tessera {

// A parameter of the engine: number of its flat, and in that.
struct ParameterRef {
  int flat, parameter;
};

struct EngineParts {
  // FailedPrecondition after Close, and within a Backward; what has been lost.
  // LOCAL.
  absl::Status CheckOpen() const;
  // FailedPrecondition while a scope of Engine::Summon is open. LOCAL.
  absl::Status CheckNotSummoned() const;
  // FailedPrecondition while the parameters are their averages. LOCAL.
  absl::Status CheckNotAveraged() const;
  // By the first name of a parameter; by name of a flat. NotFound, and
  // CheckOpen's. LOCAL.
  absl::StatusOr<ParameterRef> Find(absl::string_view name) const;
  absl::StatusOr<FlatParameter*> FindFlat(absl::string_view name) const;
  FlatParameter& flat(const ParameterRef& place) const {
    return *flats[static_cast<size_t>(place.flat)];
  }
  // A call that changes masters or states could not end: where some of them are
  // elsewhere, what is there is neither the old nor the new, and nothing trains
  // on with it. LOCAL.
  void FailTiers(const absl::Status& status);
  // The same wherever they are: some units have been stepped. LOCAL.
  void Lose(const absl::Status& status);
  // Of a group's parameter, until RestoreRequiresGrad. LOCAL.
  void SetRequiresGrad(const at::Tensor& parameter, bool requires_grad);
  void RestoreRequiresGrad();
  // What the step's gradients are divided by at last. REQUIRES: open.
  double divisor() const;
  at::Device device() const;

  // ---- made by Engine::Impl, and then as they are until Close ----
  std::shared_ptr<torch::nn::Module> module;
  proto::Config config;
  std::shared_ptr<Communicator> comm;  // all ranks
  // Those that the flats are sharded over, comm itself or neighbours of it; and
  // those that hold the same part as this rank, null if none does.
  std::shared_ptr<Communicator> shard_group, replicas;
  Settings settings;
  int stage = 0;
  std::shared_ptr<Schedule> schedule;
  std::vector<std::shared_ptr<FlatParameter>> flats;
  absl::flat_hash_map<std::string, ParameterRef> places;
  std::unique_ptr<BufferSync> buffer_sync;  // null: buffers are each rank's own
  std::unique_ptr<Gradients> gradients;
  std::unique_ptr<RecomputedUnits> recomputed;  // null: nothing is
  std::shared_ptr<const PlanReport> plan;       // EngineOptions::plan
  std::unique_ptr<ShardedOptimizer> optimizer;  // null: there is none
  std::unique_ptr<LrSchedule> lr_schedule;      // null: the rate stays
  std::optional<LossScaler> scaler;
  std::shared_ptr<UpdateStream> stream;  // null: all is in memory
  bool shares_working_copy = false;
  std::shared_ptr<ServedGathers> served;  // null: gathers are collectives
  bool closed = false;
  bool moved = false;        // by Engine::Offload
  bool averages_in = false;  // by Engine::SwapInAverages
  // By flat, masters where gradients are taken, while the parameters are
  // averages that no state holds (schedule-free AdamW).
  std::vector<TieredBuffer> training_points;
  absl::Status lost;

  // ---- the optimizer's, as they are without a schedule: made by Engine::Impl,
  // changed by SetLearningRate, Trainer's SetOption, and LoadCheckpoint ----
  ParameterGroups groups;
  std::vector<OptimizerOptions> configured_options;  // as made
  // Parameters that were frozen, or no longer are: what they were before.
  absl::flat_hash_map<at::TensorImpl*, std::pair<at::Tensor, bool>>
      requires_grad_before;

  // ---- the step's, by Trainer: its Backwards have weights, or have none ----
  std::optional<bool> weighted;

  // ---- flats in open scopes of Engine::Summon, by these ----
  absl::flat_hash_set<const FlatParameter*> summoned;

  // ---- by Engine::Impl: called before masters or states change ----
  std::function<void()> before_change;

  // ---- by flat: written to since replicas were last seen to be equal,
  // somewhere; by CheckReplicas (engine/parts/write_checks.h) ----
  std::vector<bool> unverified_replicas;
};

}  // namespace tessera
#endif  // ENGINE_PARTS_ENGINE_PARTS_H_
