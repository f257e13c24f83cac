// Which group each parameter is stepped with: what a configuration
// (optimizer.param_groups, optimizer.no_decay) and a program
// (EngineOptions::param_groups) say of them.
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
  // Their own gradient_clipping; empty where no group has one.
  std::vector<std::optional<double>> max_norms;
  // The same, adaptive_gradient_clipping.
  std::vector<std::optional<double>> adaptive;
};

// `base`: the options of who is in no group; `muon`: of matrices, with Muon.
// The program's groups come first. InvalidArgument of a pattern or class that
// means nothing, of two groups that claim one parameter, and of options that
// the optimizer does not have. LOCAL; the program's predicates run here.
absl::StatusOr<GroupChoice> ChooseGroups(
    const proto::Optimizer& config, const std::vector<ParameterGroup>& program,
    const OptimizerOptions& base, const std::optional<OptimizerOptions>& muon,
    const torch::nn::Module& module, const std::vector<UnitPlan>& units);

// FlatOptions::part: parameters of other algorithms lie in other flats, since
// their states are others. `groups` is borrowed.
std::function<int(const NamedParameter&)> PartsOf(
    const ParameterGroups& groups);
// The algorithm and states that all parameters of a flat have; null without
// groups, where there is no optimizer.
const OptimizerOptions* OptimizerOf(const ParameterGroups& groups,
                                    const FlatPlan& flat);

// By group: its own adaptive_gradient_clipping, or that of all. Empty: none is
// above 0. LOCAL.
std::vector<double> AdaptiveClippingOf(const GroupChoice& choice,
                                       double of_all);

// All that ranks must have chosen alike, to the last bit. LOCAL.
std::string Describe(const GroupChoice& choice);

}  // namespace tessera
#endif  // ENGINE_BUILD_GROUP_CHOICE_H_
