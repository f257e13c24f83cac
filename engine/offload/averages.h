// Exchanges the parameters with their averages (optimizer.params.ema_decay, or
// those of schedule-free AdamW): Engine::SwapInAverages and SwapOutAverages, of
// which this is the inside.
#ifndef ENGINE_OFFLOAD_AVERAGES_H_
#define ENGINE_OFFLOAD_AVERAGES_H_

#include "absl/status/status.h"
#include "engine/parts/engine_parts.h"

namespace tessera {

// `in`: the parameters become their averages; else what they were again.
// COLLECTIVE; takes memory for the largest unit's owned part. Of schedule-free
// AdamW masters are kept where its states are, owned parts of all units, until
// they are back: the average is made of them and of z, which must both stay.
absl::Status SwapAverages(EngineParts* parts, bool in);

}  // namespace tessera
#endif  // ENGINE_OFFLOAD_AVERAGES_H_
