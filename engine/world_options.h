// From a configuration to the world. Init comes before Engine::Create, and with
// it the choice of backend and timeouts. So a program that wants them from its
// configuration reads that section first:
//
//   TESSERA_ASSIGN_OR_RETURN(auto options, WorldOptionsFrom("zero3.json"));
//   TESSERA_ASSIGN_OR_RETURN(auto* world, Init(&argc, argv, options));
//   TESSERA_ASSIGN_OR_RETURN(auto engine, Engine::Create(model, "zero3.json"));
//
// If it does not, Engine::Create refuses a configuration whose communication
// section says something else than the world was made with. Where the program's
// flags name the file, it reads these first: WithoutInitFlags
// (comm/world/world.h).
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

// `options`, with what the communication section of the file says in their
// place. Looks at no other section; ignore_unknown as in LoadConfig. LOCAL.
// Errors: NotFound, InvalidArgument.
absl::StatusOr<WorldOptions> WorldOptionsFrom(const std::string& config_path,
                                              WorldOptions options = {},
                                              bool ignore_unknown = false);

// OK if a world with these options is what `communication` says; else
// InvalidArgument naming the key. The start-up timeout does not count: that is
// over.
absl::Status CheckCommunication(const proto::Communication& communication,
                                const WorldOptions& options);

}  // namespace tessera
#endif  // ENGINE_WORLD_OPTIONS_H_
