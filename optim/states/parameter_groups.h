// ParameterGroups: groups of parameters with options of their own, like
// torch.optim's param_groups.
#ifndef OPTIM_STATES_PARAMETER_GROUPS_H_
#define OPTIM_STATES_PARAMETER_GROUPS_H_

#include <string>
#include <vector>

#include "optim/algorithms/optimizer_options.h"

namespace tessera {

struct ParameterGroups {
  // The options of each group; there is at least one. Parameters of one unit
  // have one formula (FormulaOf) and type of states. The first group has the
  // parameters that no other claims.
  std::vector<OptimizerOptions> options;
  std::vector<std::string> names;  // of each group
  std::vector<int> of;             // the group of each parameter of the model
};

}  // namespace tessera
#endif  // OPTIM_STATES_PARAMETER_GROUPS_H_
