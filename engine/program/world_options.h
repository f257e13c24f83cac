// Compares a configuration with the world that it is used in, and makes the
// world's options from one (WorldOptionsFrom: engine/program/start.h).
#ifndef ENGINE_PROGRAM_WORLD_OPTIONS_H_
#define ENGINE_PROGRAM_WORLD_OPTIONS_H_

#include "absl/status/status.h"
#include "comm/world/world.h"

namespace tessera {

namespace proto {
class Communication;
}

// Sets what the section sets; the rest of `options` stays.
void TakeCommunication(const proto::Communication& communication,
                       WorldOptions* options);

// Returns OK if a world with these options is what `communication` says; else
// InvalidArgument with the key. The start-up timeout is not compared: the start
// is over.
absl::Status CheckCommunication(const proto::Communication& communication,
                                const WorldOptions& options);

}  // namespace tessera
#endif  // ENGINE_PROGRAM_WORLD_OPTIONS_H_
