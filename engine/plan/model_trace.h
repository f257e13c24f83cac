// ModelTrace: a module's units and the trace of a micro-batch: all of a plan
// that does not depend on the stage.
#ifndef ENGINE_PLAN_MODEL_TRACE_H_
#define ENGINE_PLAN_MODEL_TRACE_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/build/settings.h"
#include "engine/plan/plan.h"
#include "optim/states/parameter_groups.h"
#include "sharding/partition/partition.h"
#include "sharding/trace/trace.h"

namespace tessera {

namespace proto {
class Optimizer;
}

struct ModelTrace {
  Partition partition;
  std::vector<bool> trainable;  // by number of the parameter
  ParameterGroups groups;       // none without an optimizer
  Trace trace;
  // RecomputationOptions::module_of for the modules that
  // activation_checkpointing names, and for those that its "auto" means.
  std::vector<int> recomputed, automatic;
  bool recomputes = false;  // activation_checkpointing names some
  int64_t buffer_bytes = 0;
};

// Traces the module with parameters of the working dtypes, and with autocast
// where the configuration has it; parameters of frozen groups (of `optimizer`
// and `param_groups`) are frozen meanwhile. Errors are Plan's
// (engine/plan/plan.h). LOCAL.
absl::StatusOr<ModelTrace> TraceModel(const torch::nn::Module& module,
                                      const std::function<at::Tensor()>& loss,
                                      const proto::Optimizer& optimizer,
                                      const Settings& settings,
                                      const PlanOptions& options);

// Returns the index in `units` of each parameter of the trace; -1: it is in
// none.
template <typename Units>
std::vector<int> PlacesIn(const Units& units, const Trace& trace) {
  absl::flat_hash_map<const c10::TensorImpl*, int> of_tensor;
  for (size_t i = 0; i < units.size(); ++i) {
    for (const NamedParameter& p : units[i].parameters) {
      of_tensor[p.tensor.unsafeGetTensorImpl()] = static_cast<int>(i);
    }
  }
  std::vector<int> places;
  for (const TracedParameter& p : trace.parameters) {
    const auto found = of_tensor.find(p.tensor);
    places.push_back(found == of_tensor.end() ? -1 : found->second);
  }
  return places;
}

}  // namespace tessera
#endif  // ENGINE_PLAN_MODEL_TRACE_H_
