// Exchanges the parameters with their averages (optimizer.params.ema_decay, or
// those of schedule-free AdamW), for Engine::SwapInAverages and
// SwapOutAverages.
#ifndef ENGINE_VALUES_AVERAGES_H_
#define ENGINE_VALUES_AVERAGES_H_

#include "absl/status/status.h"
#include "engine/model/optimization.h"
#include "engine/model/optimizer_groups.h"
#include "engine/model/update_guard.h"

namespace tessera {

// Makes the parameters their averages (`in`), or what they were before.
// COLLECTIVE; takes memory for the largest unit's owned part. With
// schedule-free AdamW a copy of all owned masters is kept where its states are
// until they are back, since the average is computed from the masters and z.
absl::Status SwapAverages(UpdateGuard* guard, const Optimization& optimization,
                          const OptimizerGroups& groups, bool in);

}  // namespace tessera
#endif  // ENGINE_VALUES_AVERAGES_H_
