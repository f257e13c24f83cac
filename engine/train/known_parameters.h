// KnownParameters: notes the module's parameters when an engine takes it over.
// One that is registered later would not be trained.
#ifndef ENGINE_TRAIN_KNOWN_PARAMETERS_H_
#define ENGINE_TRAIN_KNOWN_PARAMETERS_H_

#include <cstdint>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class KnownParameters {
 public:
  // Notes the parameters that `module` has now. LOCAL.
  void Note(const torch::nn::Module& module);
  // Returns FailedPrecondition if `module` has other parameters. LOCAL.
  absl::Status Check(const torch::nn::Module& module) const;

 private:
  absl::flat_hash_set<const void*> known_;
  uint64_t fingerprint_ = 0;
};

}  // namespace tessera
#endif  // ENGINE_TRAIN_KNOWN_PARAMETERS_H_
