// ProcessSettings: what is the process's own and is an engine's from Create to
// Close: the limit of what it may hold, libtorch's switches. Destroying it
// gives both back.
#ifndef ENGINE_BUILD_PROCESS_SETTINGS_H_
#define ENGINE_BUILD_PROCESS_SETTINGS_H_

#include <cstdint>
#include <optional>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "base/memory/ledger.h"
#include "base/torch/deterministic.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class ProcessSettings {
 public:
  // sharding.deterministic, where `module` is on a device; absent: off. LOCAL.
  absl::Status MakeDeterministic(const torch::nn::Module& module,
                                 std::optional<Determinism> determinism);
  // sharding.memory_limit_bytes from here on: what was made before is the
  // module's, and the plan's. 0: no limit. LOCAL.
  void LimitMemory(at::Device device, int64_t bytes, int stage);
  void GiveBack() {
    limit_.reset();
    deterministic_.reset();
  }

 private:
  std::optional<MemoryLimit> limit_;
  std::optional<DeterministicScope> deterministic_;
};

}  // namespace tessera
#endif  // ENGINE_BUILD_PROCESS_SETTINGS_H_
