// PipelineStages: which stage of a pipeline each parameter is at
// (pipeline.stages), and what is left of it on the other ranks: a tensor of its
// sizes without memory, which the module keeps, and a stand-in of one element,
// which the layers below get as their parameter.
#ifndef ENGINE_DIVIDE_PIPELINE_STAGES_H_
#define ENGINE_DIVIDE_PIPELINE_STAGES_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "engine/api/engine_types.h"
#include "engine/build/settings.h"
#include "optim/states/parameter_groups.h"
#include "parallel/pipeline/pipeline_times.h"
#include "parallel/pipeline/schedule.h"
#include "parallel/pipeline/stage_plan.h"
#include "parallel/pipeline/staged_run.h"
#include "sharding/partition/partition.h"

namespace torch::nn {
class Module;
}

namespace tessera {

// Chooses the stage of each parameter of `units`, by NamedParameter::index: as
// pipeline.split_points says, or so that stages cost the same, by a trace of
// EngineOptions::planned_loss where there is one, else by their elements.
// InvalidArgument: there are fewer units than stages, or split points that are
// none. Unimplemented, by name: what cannot be at a stage. LOCAL.
absl::StatusOr<PipelinePlan> ChooseStages(const proto::Config& config,
                                          const Settings& settings,
                                          const ParameterGroups& groups,
                                          const EngineOptions& options,
                                          const torch::nn::Module& module,
                                          const std::vector<UnitPlan>& units);

// Returns pipeline.schedule.
PipelineSchedule ScheduleOf(const proto::Config& config);

class PipelineStages {
 public:
  // Leaves this rank the parameters of `stages[index]` == its rank in
  // `pipeline`, and the others without memory, in the dtype that they are
  // computed in. Unimplemented: a parameter that shares memory; nothing is
  // changed then. LOCAL.
  absl::Status Divide(
      const std::vector<int>& stages,
      const std::shared_ptr<Communicator>& pipeline,
      const std::function<at::ScalarType(const NamedParameter&)>& dtype,
      std::vector<UnitPlan>* units);
  // Makes all parameters whole again, with their values. COLLECTIVE over the
  // pipeline. ResourceExhausted.
  absl::Status GiveBack();
  // What the run of a pipeline is told.
  const std::vector<StagedParameter>& parameters() const { return staged_; }

 private:
  std::shared_ptr<Communicator> pipeline_;
  std::vector<StagedParameter> staged_;
  std::vector<at::ScalarType> dtypes_;  // that they had, in their order
};

}  // namespace tessera
#endif  // ENGINE_DIVIDE_PIPELINE_STAGES_H_
