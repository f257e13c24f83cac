// Engine::SaveSafetensors.
#ifndef ENGINE_CHECKPOINT_SAFETENSORS_SAVING_H_
#define ENGINE_CHECKPOINT_SAFETENSORS_SAVING_H_

#include <string>

#include "absl/status/status.h"
#include "engine/api/engine_types.h"
#include "engine/checkpoint/training_state.h"

namespace tessera {

// Writes safetensors files as Engine::SaveSafetensors says. COLLECTIVE.
absl::Status WriteSafetensorsOf(const TrainingState& state,
                                const std::string& dir,
                                const SaveSafetensorsOptions& options);

}  // namespace tessera
#endif  // ENGINE_CHECKPOINT_SAFETENSORS_SAVING_H_
