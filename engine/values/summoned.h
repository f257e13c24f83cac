// Summoned: holds units whole in place for a while, on all ranks or on rank 0
// only, and then keeps or discards what was written into them, for
// Engine::Summon and its scope (engine/engine.h).
#ifndef ENGINE_VALUES_SUMMONED_H_
#define ENGINE_VALUES_SUMMONED_H_

#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/api/engine_types.h"
#include "engine/model/update_guard.h"

namespace tessera {

// Returns the module's parameters of these names; a tied one has any of its
// names. NotFound. LOCAL.
absl::StatusOr<std::vector<at::Tensor>> ParametersByName(
    const torch::nn::Module& module, const std::vector<std::string>& names);

class Summoned {
 public:
  // Holds the units of `parameters` as Engine::Summon says; an error in
  // `parameters` is returned on all ranks. `guard` ends with its engine.
  // COLLECTIVE.
  static absl::StatusOr<std::unique_ptr<Summoned>> Open(
      const std::shared_ptr<UpdateGuard>& guard,
      absl::StatusOr<std::vector<at::Tensor>> parameters,
      const SummonOptions& options);
  // If it was not closed, discards what was written, also where the engine is
  // gone. LOCAL.
  ~Summoned();
  Summoned(const Summoned&) = delete;
  Summoned& operator=(const Summoned&) = delete;

  // Carries out SummonScope::Close. COLLECTIVE.
  absl::Status Close();

 private:
  Summoned(const std::shared_ptr<UpdateGuard>& guard,
           const SummonOptions& options, std::vector<at::Tensor> parameters);
  absl::Status Hold(UpdateGuard* guard, size_t u);
  absl::Status CloseFlat(UpdateGuard* guard, FlatParameter* flat);
  void Drop();

  const std::weak_ptr<UpdateGuard> guard_;  // the engine's, while it is there
  const SummonOptions options_;
  const bool holds_;  // this rank holds the units
  const std::vector<at::Tensor> parameters_;
  std::vector<std::shared_ptr<FlatParameter>> flats_;  // still held, in order
};

}  // namespace tessera
#endif  // ENGINE_VALUES_SUMMONED_H_
