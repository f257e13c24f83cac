// Parameters and buffers of a module from safetensors files, each rank its own
// part.
#ifndef ENGINE_ACCESS_SAFETENSORS_LOADING_H_
#define ENGINE_ACCESS_SAFETENSORS_LOADING_H_

#include <string>

#include "absl/status/statusor.h"
#include "engine/parts/engine_types.h"
#include "engine/parts/update_guard.h"

namespace tessera {

// As Engine::LoadSafetensors. COLLECTIVE.
absl::StatusOr<LoadSafetensorsReport> LoadSafetensors(
    UpdateGuard* guard, const std::string& path,
    const LoadSafetensorsOptions& options);

}  // namespace tessera
#endif  // ENGINE_ACCESS_SAFETENSORS_LOADING_H_
