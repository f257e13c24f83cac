// OptimizerGroups: the options of an engine's groups of parameters, as they are
// set and as the schedule makes them for a step. engine/engine.h documents the
// calls that Engine has under the same name.
//
// Threads: none; calls of an engine come from one thread at a time.
#ifndef ENGINE_MODEL_OPTIMIZER_GROUPS_H_
#define ENGINE_MODEL_OPTIMIZER_GROUPS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/model/engine_life.h"
#include "engine/model/sharded_model.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/schedule/lr_schedule.h"
#include "optim/states/parameter_groups.h"

namespace tessera {

class OptimizerGroups {
 public:
  // `model` and `life` outlive this. `schedule` null: the rate is constant.
  OptimizerGroups(const ShardedModel* model, const EngineLife* life,
                  std::unique_ptr<LrSchedule> schedule)
      : model_(model), life_(life), schedule_(std::move(schedule)) {}

  // Sets the configuration's groups: called by Engine::Create, where there is
  // an optimizer.
  void Configure(ParameterGroups groups) {
    configured_ = groups.options;
    groups_ = std::move(groups);
  }
  // Sets the options that a checkpoint has.
  void Restore(std::vector<OptimizerOptions> options) {
    groups_.options = std::move(options);
  }

  // The groups as they are set, without the schedule; none without an
  // optimizer.
  const ParameterGroups& groups() const { return groups_; }
  const std::vector<OptimizerOptions>& configured() const {
    return configured_;
  }
  bool any() const { return !groups_.options.empty(); }
  // The scheduler, null if there is none; and its Plateau, null if it follows
  // no metric.
  const LrSchedule* schedule() const { return schedule_.get(); }
  Plateau* plateau() const {
    return schedule_ == nullptr ? nullptr : schedule_->plateau();
  }
  // Returns each group's options for the optimizer step after `steps_done`.
  // LOCAL.
  std::vector<OptimizerOptions> Scheduled(int64_t steps_done) const;

  // Returns a group's number. NotFound; FailedPrecondition without an
  // optimizer. LOCAL.
  absl::StatusOr<size_t> Find(absl::string_view name) const;
  absl::Status SetLearningRate(double rate);
  absl::Status ReportMetric(double metric);
  absl::Status SetOption(absl::string_view group, absl::string_view option,
                         double value, int64_t steps_done);
  // As Engine::SetFrozen; FailedPrecondition if `within_step`.
  absl::Status SetFrozen(absl::string_view group, bool frozen,
                         bool within_step);
  // Sets requires_grad of a group's parameter, until RestoreRequiresGrad.
  // LOCAL.
  void SetRequiresGrad(const at::Tensor& parameter, bool requires_grad);
  void RestoreRequiresGrad();

 private:
  bool ScheduleSets(absl::string_view option, int64_t steps_done) const;
  absl::Status CheckOption(absl::string_view group, absl::string_view option,
                           double value, int64_t steps_done) const;

  const ShardedModel* const model_;
  const EngineLife* const life_;
  const std::unique_ptr<LrSchedule> schedule_;
  ParameterGroups groups_;
  std::vector<OptimizerOptions> configured_;
  // requires_grad as it was before, of parameters that were frozen or unfrozen.
  absl::flat_hash_map<at::TensorImpl*, std::pair<at::Tensor, bool>>
      requires_grad_before_;
};

}  // namespace tessera
#endif  // ENGINE_MODEL_OPTIMIZER_GROUPS_H_
