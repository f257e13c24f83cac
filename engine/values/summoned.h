// Summoned: units that are held whole in place for a while, by all ranks or by
// rank 0 alone, and what was written into them then kept, or taken back:
// Engine::Summon and its scope (engine/engine.h), of which this is the inside.
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

// The module's parameters of these names, any of a tied one's. NotFound. LOCAL.
absl::StatusOr<std::vector<at::Tensor>> ParametersByName(
    const torch::nn::Module& module, const std::vector<std::string>& names);

class Summoned {
 public:
  // `guard` goes with its engine. Makes the units of `parameters`, or where
  // these are an error says so to all ranks. As Engine::Summon. COLLECTIVE.
  static absl::StatusOr<std::unique_ptr<Summoned>> Open(
      const std::shared_ptr<UpdateGuard>& guard,
      absl::StatusOr<std::vector<at::Tensor>> parameters,
      const SummonOptions& options);
  // Without Close: takes back what was written, also where the engine is gone.
  // LOCAL.
  ~Summoned();
  Summoned(const Summoned&) = delete;
  Summoned& operator=(const Summoned&) = delete;

  // As Engine::SummonScope::Close. COLLECTIVE.
  absl::Status Close();

 private:
  Summoned(const std::shared_ptr<UpdateGuard>& guard,
           const SummonOptions& options, std::vector<at::Tensor> parameters);
  absl::Status Hold(UpdateGuard* guard, size_t u);
  absl::Status CloseFlat(UpdateGuard* guard, FlatParameter* flat);
  void Drop();

  const std::weak_ptr<UpdateGuard> guard_;  // the engine's, while it is there
  const SummonOptions options_;
  const bool holds_;  // this rank does
  const std::vector<at::Tensor> parameters_;
  std::vector<std::shared_ptr<FlatParameter>> flats_;  // still held, in order
};

}  // namespace tessera
#endif  // ENGINE_VALUES_SUMMONED_H_
