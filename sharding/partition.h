// Partition: which parameters of a module make up which unit.
//
// Automatic: the outermost type of module that is the user's own and occurs at
// least twice (a transformer block, say) makes one unit per instance; torch's
// own types are taken only if no other does. What lies before, between and
// after them makes units of contiguous runs of registration. Units hold one
// dtype and at most `max_unit_numel` elements; larger ones are cut between
// parameters.
#ifndef SHARDING_PARTITION_H_
#define SHARDING_PARTITION_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "sharding/unit.h"

namespace torch::nn {
class Module;
}

namespace tessera {

struct UnitPlan {
  std::string name;  // of the module, or of its first parameter
  std::vector<NamedParameter> parameters;
};

// Every parameter of the module once (tied ones under their first name), in
// order of registration. Parameters without elements stay outside. LOCAL, the
// same on ranks that built the same module. InvalidArgument names a parameter
// that cannot be sharded: its dtype is not float32 or float64, it is not dense,
// it overlaps another, it is on another device than the first.
absl::StatusOr<std::vector<UnitPlan>> PlanUnits(const torch::nn::Module& module,
                                                int64_t max_unit_numel);

}  // namespace tessera
#endif  // SHARDING_PARTITION_H_
