// What a CheckpointManager makes of its options and of the configuration.
#ifndef ENGINE_CHECKPOINT_MANAGER_OPTIONS_H_
#define ENGINE_CHECKPOINT_MANAGER_OPTIONS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/checkpoint_manager.h"

namespace tessera {

namespace proto {
class Checkpoint;
}

// Returns `options` with what is unset as `section` says, async and node_local
// excepted, which the engine knows.
CheckpointManagerOptions CompletedOptions(CheckpointManagerOptions options,
                                          const proto::Checkpoint& section);

// Both REQUIRE completed options. CheckOptions returns InvalidArgument for
// values that cannot be; TextOf says all that is to be identical on all ranks.
absl::Status CheckOptions(const CheckpointManagerOptions& options);
std::string TextOf(const CheckpointManagerOptions& options);

// Returns what the log says, once, of checkpoints that had to go because of
// keep_last.
std::string RemovalText(const CheckpointManagerOptions& options,
                        const std::vector<std::string>& removed);

}  // namespace tessera
#endif  // ENGINE_CHECKPOINT_MANAGER_OPTIONS_H_
