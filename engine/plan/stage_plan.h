// Makes the plan of one stage from a model's trace.
#ifndef ENGINE_PLAN_STAGE_PLAN_H_
#define ENGINE_PLAN_STAGE_PLAN_H_

#include "absl/status/statusor.h"
#include "engine/build/settings.h"
#include "engine/plan/model_trace.h"
#include "engine/plan/plan.h"

namespace tessera {

namespace proto {
class Config;
}

// Which modules are computed again.
enum class Recomputed {
  kNone,
  kConfigured,  // by activation_checkpointing and EngineOptions
  kAutomatic,   // as activation_checkpointing.units "auto" means
};

// Plans training of the traced module at `stage`, and otherwise as `config` and
// `settings` say. LOCAL. InvalidArgument: the units.
absl::StatusOr<StagePlan> PlanStage(const ModelTrace& model, int stage,
                                    Recomputed recomputed,
                                    const proto::Config& config,
                                    Settings settings,
                                    const PlanOptions& options);

// Returns the memory that a rank may use by a resolved configuration. LOCAL.
absl::StatusOr<int64_t> MemoryOfRank(const proto::Config& config,
                                     const PlanOptions& options);

// Returns the settings of a resolved configuration, for plans. LOCAL.
Settings PlanSettings(const proto::Config& config, const PlanOptions& options);

}  // namespace tessera
#endif  // ENGINE_PLAN_STAGE_PLAN_H_
