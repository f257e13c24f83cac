// Loads parameters and buffers of a module from safetensors files; each rank
// reads its own part.
#ifndef ENGINE_CHECKPOINT_SAFETENSORS_LOADING_H_
#define ENGINE_CHECKPOINT_SAFETENSORS_LOADING_H_

#include <string>

#include "absl/status/statusor.h"
#include "engine/api/engine_types.h"
#include "engine/model/update_guard.h"

namespace tessera {

// Carries out Engine::LoadSafetensors. COLLECTIVE.
absl::StatusOr<LoadSafetensorsReport> LoadSafetensors(
    UpdateGuard* guard, const std::string& path,
    const LoadSafetensorsOptions& options);

}  // namespace tessera
#endif  // ENGINE_CHECKPOINT_SAFETENSORS_LOADING_H_
