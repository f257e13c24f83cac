// Chooses the group that each parameter is stepped with, as a configuration
// (optimizer.param_groups, optimizer.no_decay) and a program
// (EngineOptions::param_groups) say.
#ifndef ENGINE_BUILD_GROUP_CHOICE_H_
#define ENGINE_BUILD_GROUP_CHOICE_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/api/engine_types.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/states/parameter_groups.h"
#include "sharding/partition/flat_plan.h"
#include "sharding/partition/partition.h"

namespace torch::nn {
class Module;
}

namespace tessera {

namespace proto {
class Optimizer;
}

struct GroupChoice {
  ParameterGroups groups;
  std::vector<bool> frozen;  // of each group
  // Each group's own gradient_clipping; empty where no group has one.
  std::vector<std::optional<double>> max_norms;
  // Each group's own adaptive_gradient_clipping; empty where no group has one.
  std::vector<std::optional<double>> adaptive;
};

// Chooses the groups, the program's first. `base`: options of parameters in no
// group; `muon`: options of matrices, with Muon. InvalidArgument: a pattern or
// class that matches nothing, two groups that claim one parameter, options that
// the optimizer does not have. LOCAL; the program's predicates run here.
absl::StatusOr<GroupChoice> ChooseGroups(
    const proto::Optimizer& config, const std::vector<ParameterGroup>& program,
    const OptimizerOptions& base, const std::optional<OptimizerOptions>& muon,
    const torch::nn::Module& module, const std::vector<UnitPlan>& units);

// Makes FlatOptions::part: parameters of different algorithms lie in different
// flats, since their states differ. `groups` is borrowed.
std::function<int(const NamedParameter&)> PartsOf(
    const ParameterGroups& groups);
// Returns the algorithm and states that all parameters of a flat have; null
// without groups, where there is no optimizer.
const OptimizerOptions* OptimizerOf(const ParameterGroups& groups,
                                    const FlatPlan& flat);

// Returns each group's adaptive_gradient_clipping: its own, or `of_all`. Empty:
// none is above 0. LOCAL.
std::vector<double> AdaptiveClippingOf(const GroupChoice& choice,
                                       double of_all);

// Describes all choices that must be identical on all ranks, to the last bit.
// LOCAL.
std::string Describe(const GroupChoice& choice);

}  // namespace tessera
#endif  // ENGINE_BUILD_GROUP_CHOICE_H_
