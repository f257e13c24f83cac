// State dicts: all masters at once, whole or as this rank's parts.
#ifndef ENGINE_ACCESS_STATE_DICT_H_
#define ENGINE_ACCESS_STATE_DICT_H_

#include <vector>

#include "absl/status/statusor.h"
#include "engine/parts/engine_parts.h"
#include "engine/parts/engine_types.h"

namespace tessera {

// As Engine::FullStateDict and Engine::ShardedStateDict. COLLECTIVE.
absl::StatusOr<StateDict> FullStateDict(EngineParts* parts,
                                        const StateDictOptions& options);
absl::StatusOr<std::vector<ParameterShard>> ShardedStateDict(
    EngineParts* parts);

}  // namespace tessera
#endif  // ENGINE_ACCESS_STATE_DICT_H_
