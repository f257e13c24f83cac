// The parameters of a module, for a plan: which of them may be divided.
#ifndef PARALLEL_PLAN_PLANNED_PARAMETERS_H_
#define PARALLEL_PLAN_PLANNED_PARAMETERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"
#include "parallel/tensor/placed.h"

namespace torch::nn {
class Module;
}

namespace tessera {

struct PlannedParameter {
  std::string name;
  at::Tensor tensor;
  // Why it stays whole, whatever its sizes: "shares memory with another
  // parameter"; empty: it may be divided.
  std::string stays_whole;
};

// Returns the parameters of `module` as in named_parameters(), each once, by
// its first name.
std::vector<PlannedParameter> PlannedParameters(
    const torch::nn::Module& module);

bool CanDivide(const PlannedParameter& parameter,
               const TensorPlacement& placement, int ranks);

// Returns "layers.3" for "layers.3.weight", "" for "weight".
absl::string_view OwnerOf(absl::string_view parameter);

// Returns a name with '*' for what numbers repeated modules: "layers.*.q.bias",
// "layer*.q.bias", and "layers.*.bias", but "fc3.bias" as it is. `owners`:
// whether the module that has the parameter may be one of them.
std::string WithoutNumbers(absl::string_view name, bool owners = true);

}  // namespace tessera
#endif  // PARALLEL_PLAN_PLANNED_PARAMETERS_H_
