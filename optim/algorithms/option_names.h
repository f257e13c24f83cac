// Accesses the hyperparameters of an algorithm by the names that torch::optim
// and DeepSpeed give them: for configurations, groups and calls.
#ifndef OPTIM_ALGORITHMS_OPTION_NAMES_H_
#define OPTIM_ALGORITHMS_OPTION_NAMES_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "optim/algorithms/optimizer_options.h"

namespace tessera {

// Returns the names of an algorithm's options: "lr", "beta1", "weight_decay",
// ... Flags are 0 or 1.
std::vector<std::string> OptionNames(Algorithm algorithm);

using OptionValues = std::vector<std::pair<std::string, double>>;

// Sets options, in any order: what must fit together (nesterov and its
// momentum) is checked when all are set. InvalidArgument: a name that the
// algorithm does not have (with the most similar one), or a value out of range;
// FailedPrecondition: a value that would change which states there are (a
// momentum where there was none). Nothing has changed then. LOCAL.
absl::Status SetOptions(const OptionValues& values, OptimizerOptions* options);
// Sets one option.
absl::Status SetOption(absl::string_view name, double value,
                       OptimizerOptions* options);
// Returns an option. InvalidArgument: a name that the algorithm does not have.
// LOCAL.
absl::StatusOr<double> OptionOf(absl::string_view name,
                                const OptimizerOptions& options);

}  // namespace tessera
#endif  // OPTIM_ALGORITHMS_OPTION_NAMES_H_
