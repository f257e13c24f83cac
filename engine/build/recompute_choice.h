// Which modules are computed again in backward (sharding/recompute), of those
// that a configuration means by activation_checkpointing.units.
#ifndef ENGINE_BUILD_RECOMPUTE_CHOICE_H_
#define ENGINE_BUILD_RECOMPUTE_CHOICE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "sharding/partition/partition.h"

namespace tessera {

struct RecomputeChoice {
  // Classes of modules; "auto": the modules that are units, of a class that has
  // two or more.
  std::vector<std::string> units;
  ModulePredicate is_recomputed;  // these, too
  int64_t every = 1;              // of them, from the first on
};

struct RecomputedModule {
  std::string path;
  // Its parameters and those of modules below it, one tensor for each storage.
  std::vector<at::Tensor> parameters;
};

struct RecomputedModules {
  std::vector<RecomputedModule> modules;  // in order of registration
  // Parameters that several of them share, or one of them and the rest.
  std::vector<at::Tensor> shared;
};

// Finds the outermost modules that `choice` means. InvalidArgument: a class
// that no module has. LOCAL, with identical results on ranks that built the
// same module.
absl::StatusOr<RecomputedModules> ChooseRecomputed(
    const torch::nn::Module& module, absl::Span<const UnitPlan> units,
    const RecomputeChoice& choice);

}  // namespace tessera
#endif  // ENGINE_BUILD_RECOMPUTE_CHOICE_H_
