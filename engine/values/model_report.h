// Describes what a model is and holds, for logs and reports.
#ifndef ENGINE_VALUES_MODEL_REPORT_H_
#define ENGINE_VALUES_MODEL_REPORT_H_

#include <string>
#include <vector>

#include "engine/api/engine_types.h"
#include "engine/model/optimization.h"
#include "engine/model/sharded_model.h"
#include "optim/states/parameter_groups.h"

namespace tessera {

// Compute Engine::state_bytes and Engine::replicated_state_bytes; without
// groups there is no optimizer. LOCAL.
StateBytes ResidentStateBytes(const ShardedModel& model,
                              const Optimization& optimization);
StateBytes ReplicatedStateBytes(const ShardedModel& model,
                                const ParameterGroups& groups);
// Carries out Engine::DescribeUnits. LOCAL.
std::vector<std::string> DescribeUnits(const ShardedModel& model);

}  // namespace tessera
#endif  // ENGINE_VALUES_MODEL_REPORT_H_
