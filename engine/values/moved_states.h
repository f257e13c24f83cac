// Moves model states away between steps, and back, for Engine::Offload and
// Engine::Reload (engine/engine.h).
#ifndef ENGINE_VALUES_MOVED_STATES_H_
#define ENGINE_VALUES_MOVED_STATES_H_

#include "absl/status/status.h"
#include "engine/api/engine_types.h"
#include "engine/build/tiers.h"
#include "engine/model/update_guard.h"
#include "optim/sharded_optimizer.h"

namespace tessera {

// `configured`: what the configuration offloads. `states`: what to move.
absl::Status OffloadStatesOf(UpdateGuard* guard,
                             const OffloadOptions& configured,
                             const OffloadStates& states);
absl::Status ReloadStatesOf(UpdateGuard* guard);

}  // namespace tessera
#endif  // ENGINE_VALUES_MOVED_STATES_H_
