// ParameterGroups: parameters that are stepped with options of their own, as
// torch.optim's param_groups.
#ifndef OPTIM_STATES_PARAMETER_GROUPS_H_
#define OPTIM_STATES_PARAMETER_GROUPS_H_

#include <string>
#include <vector>

#include "optim/algorithms/optimizer_options.h"

namespace tessera {

struct ParameterGroups {
  // Of each group, at least one. Those of parameters of one unit have one
  // formula (FormulaOf) and type of states. The first is of parameters that no
  // other claims.
  std::vector<OptimizerOptions> options;
  std::vector<std::string> names;  // of each group
  std::vector<int> of;             // the group of each parameter of the model
};

}  // namespace tessera
#endif  // OPTIM_STATES_PARAMETER_GROUPS_H_
