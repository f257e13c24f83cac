// State dicts: read all masters at once, whole or as this rank's parts.
#ifndef ENGINE_VALUES_STATE_DICT_H_
#define ENGINE_VALUES_STATE_DICT_H_

#include <vector>

#include "absl/status/statusor.h"
#include "engine/api/engine_types.h"
#include "engine/model/update_guard.h"
#include "engine/model/write_checks.h"

namespace tessera {

// Carry out Engine::FullStateDict and Engine::ShardedStateDict. COLLECTIVE.
absl::StatusOr<StateDict> FullStateDict(UpdateGuard* guard, WriteChecks* writes,
                                        const StateDictOptions& options);
absl::StatusOr<std::vector<ParameterShard>> ShardedStateDict(
    UpdateGuard* guard);

}  // namespace tessera
#endif  // ENGINE_VALUES_STATE_DICT_H_
