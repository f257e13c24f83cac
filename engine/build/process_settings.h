// ProcessSettings: settings of the whole process that an engine changes from
// Create to Close: the memory limit and libtorch's switches. Destroying it
// restores both.
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
  // Applies sharding.deterministic, where `module` is on a device; absent: off.
  // LOCAL.
  absl::Status MakeDeterministic(const torch::nn::Module& module,
                                 std::optional<Determinism> determinism);
  // Applies sharding.memory_limit_bytes from here on: memory taken before
  // belongs to the module and the plan. 0: no limit. LOCAL.
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
