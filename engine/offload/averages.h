// Exchanges the parameters with their averages (optimizer.params.ema_decay):
// Engine::SwapInAverages and SwapOutAverages, of which this is the inside.
#ifndef ENGINE_OFFLOAD_AVERAGES_H_
#define ENGINE_OFFLOAD_AVERAGES_H_

#include "absl/status/status.h"
#include "engine/parts/engine_parts.h"

namespace tessera {

// `in`: the parameters become their averages; else what they were again.
// COLLECTIVE; takes memory for the largest unit's owned part.
absl::Status SwapAverages(EngineParts* parts, bool in);

}  // namespace tessera
#endif  // ENGINE_OFFLOAD_AVERAGES_H_
