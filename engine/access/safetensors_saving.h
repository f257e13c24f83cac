// Engine::SaveSafetensors.
#ifndef ENGINE_ACCESS_SAFETENSORS_SAVING_H_
#define ENGINE_ACCESS_SAFETENSORS_SAVING_H_

#include <string>

#include "absl/status/status.h"
#include "engine/access/training_state.h"
#include "engine/parts/engine_types.h"

namespace tessera {

// COLLECTIVE.
absl::Status WriteSafetensorsOf(const TrainingState& state,
                                const std::string& dir,
                                const SaveSafetensorsOptions& options);

}  // namespace tessera
#endif  // ENGINE_ACCESS_SAFETENSORS_SAVING_H_
