// Makes options of the world from a configuration. Init chooses backend and
// timeouts, before Engine::Create. So a program that wants them from its
// configuration reads that section first:
//
//   TESSERA_ASSIGN_OR_RETURN(auto options, WorldOptionsFrom("zero3.json"));
//   TESSERA_ASSIGN_OR_RETURN(auto* world, Init(&argc, argv, options));
//   TESSERA_ASSIGN_OR_RETURN(auto engine, Engine::Create(model, "zero3.json"));
//
// If it does not, Engine::Create refuses a configuration whose communication
// section differs from what the world was made with. A program whose flags name
// the file reads its flags first, with WithoutInitFlags (comm/world/world.h).
#ifndef ENGINE_WORLD_OPTIONS_H_
#define ENGINE_WORLD_OPTIONS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/world/world.h"  // IWYU pragma: export

namespace tessera {

namespace proto {
class Communication;
}

// Returns `options` with the values that the file's communication section sets.
// Other sections are not looked at; ignore_unknown as in LoadConfig. LOCAL.
// Errors: NotFound, InvalidArgument.
absl::StatusOr<WorldOptions> WorldOptionsFrom(const std::string& config_path,
                                              WorldOptions options = {},
                                              bool ignore_unknown = false);

// Returns OK if a world with these options is what `communication` says; else
// InvalidArgument with the key. The start-up timeout is not compared: the start
// is over.
absl::Status CheckCommunication(const proto::Communication& communication,
                                const WorldOptions& options);

}  // namespace tessera
#endif  // ENGINE_WORLD_OPTIONS_H_
