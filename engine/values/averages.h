// Exchanges the parameters with their averages (optimizer.params.ema_decay, or
// those of schedule-free AdamW): Engine::SwapInAverages and SwapOutAverages, of
// which this is the inside.
#ifndef ENGINE_VALUES_AVERAGES_H_
#define ENGINE_VALUES_AVERAGES_H_

#include "absl/status/status.h"
#include "engine/model/optimization.h"
#include "engine/model/optimizer_groups.h"
#include "engine/model/update_guard.h"

namespace tessera {

// `in`: the parameters become their averages; else what they were again.
// COLLECTIVE; takes memory for the largest unit's owned part. Schedule-free
// AdamW's masters are kept where its states are, owned parts of all units,
// until they are back: the average is made of them and of z, which must both
// stay.
absl::Status SwapAverages(UpdateGuard* guard, const Optimization& optimization,
                          const OptimizerGroups& groups, bool in);

}  // namespace tessera
#endif  // ENGINE_VALUES_AVERAGES_H_
