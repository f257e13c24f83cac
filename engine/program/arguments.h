// Reads the command line of a program that calls Start.
#ifndef ENGINE_PROGRAM_ARGUMENTS_H_
#define ENGINE_PROGRAM_ARGUMENTS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/program/start.h"

namespace tessera {

struct Arguments {
  std::string help;                   // what --help prints, if it was given
  std::optional<std::string> config;  // the value of --config
  ConfigOverrides set;                // the values of --set
  std::vector<char*> positional;      // words that are no flags, argv[0] aside
  int world = 0, plan_world = 0;      // see InitArguments
};

// Reads argv, and gives absl's flags their values. `file`: see Start. Returns
// InvalidArgument with one line that names the flag; then some flags of absl's
// may have new values. A flag of absl's own (--flagfile, --version) does what
// absl makes of it. LOCAL.
absl::StatusOr<Arguments> ReadArguments(int argc, char** argv,
                                        const StartOptions& options,
                                        absl::string_view file);

// Returns InvalidArgument if the program has a flag with one of these names:
// Init takes them wherever they are, so it would never be set. LOCAL.
absl::Status CheckFlagNames(const std::vector<InitFlag>& taken);

// Returns the name of the program's file, without its folder.
std::string ProgramName(int argc, char* const* argv);

}  // namespace tessera
#endif  // ENGINE_PROGRAM_ARGUMENTS_H_
