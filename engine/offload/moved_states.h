// Model states that move elsewhere between steps, and come back: what
// Engine::Offload and Engine::Reload do (engine/engine.h).
#ifndef ENGINE_OFFLOAD_MOVED_STATES_H_
#define ENGINE_OFFLOAD_MOVED_STATES_H_

#include "absl/status/status.h"
#include "engine/parts/engine_parts.h"
#include "engine/parts/engine_types.h"

namespace tessera {

absl::Status OffloadStatesOf(EngineParts* parts, const OffloadStates& states);
absl::Status ReloadStatesOf(EngineParts* parts);

}  // namespace tessera
#endif  // ENGINE_OFFLOAD_MOVED_STATES_H_
