// For the main function of a program: Start (flags, configuration and
// ranks), SeedAll, and TESSERA_MAIN (errors and exit codes).
//
//   absl::Status Run(int argc, char** argv) {
//     TESSERA_ASSIGN_OR_RETURN(
//         auto job, tessera::Start(&argc, argv, {.config = "zero3.json"}));
//     tessera::SeedAll(1, *job.world);
//     auto net = std::make_shared<Net>();
//     TESSERA_ASSIGN_OR_RETURN(auto engine,
//                              tessera::Engine::Create(net, job.config));
//     ...
//     return engine->Close();
//   }
//   TESSERA_MAIN(Run)
//
//   program --world=2 --config=other.json --set zero_optimization.stage=1
//
// A program may do without any of them: Init (comm/world/world.h), LoadConfig
// (config/config.h) and CatchTorch (base/torch_guard.h) are what they call.
#ifndef ENGINE_PROGRAM_START_H_
#define ENGINE_PROGRAM_START_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status.h"       // IWYU pragma: export
#include "base/torch_guard.h"  // IWYU pragma: export
#include "comm/world/world.h"  // IWYU pragma: export
#include "config/config.h"     // IWYU pragma: export

namespace tessera {

struct StartOptions {
  // What the program does, for --help: "trains a mixture of experts".
  std::string about;
  // The path of the configuration that is read unless --config gives another.
  // A relative path is looked for in the current folder, then beside the
  // program. Empty, and none of the next two: --config must be given.
  std::string config;
  // The configuration unless --config gives a file: in fields, as in
  //   Start(&argc, argv, {.training = tessera::TrainingConfig{.stage = 3}})
  // or in JSON. One of the two at most.
  std::optional<TrainingConfig> training;
  std::string config_json;
  // False for a program that reads its configurations by StartedJob::Load: it
  // has no --config, and StartedJob::config stays empty.
  bool reads_config = true;
  // Set first; where --set gives the same key, its value counts.
  ConfigOverrides set;
  AutoValues auto_values;       // for what the configuration leaves "auto"
  bool ignore_unknown = false;  // unknown keys are notes (LoadConfig)
  // Init's options; the configuration's communication section overrides them.
  WorldOptions world;
  // Words that are no flags stay in argv. False: they are errors.
  bool positional = false;
  // Called when the flags have their values, before anything is read or
  // started, in the launcher of --world and in each rank. It checks flags, and
  // may change the options above, except `about`, `reads_config` and
  // `positional`, which are used by then. An error ends the program as a faulty
  // flag does.
  std::function<absl::Status(StartOptions* options)> flags_read;
};

// StartedJob is what Start returns.
struct StartedJob {
  const World* world = nullptr;  // Init's
  // The configuration, completed for the world's ranks (with --plan_world for
  // those that are planned). Engine::Create takes it.
  proto::Config config;
  // Where it was found; empty for `training` and `config_json`.
  std::string config_path;
  // The options of Start, with those of --set in `set`.
  StartOptions options;

  // Reads another configuration of the program as Start reads its own: looked
  // for in the same places, with the same keys set. COLLECTIVE: an error on one
  // rank is returned on all. Errors as LoadConfig.
  absl::StatusOr<proto::Config> Load(const std::string& path) const;
  // Finds another file or folder of the program, the value of the flag
  // --`flag`, in the places where Start looks for its configuration.
  // COLLECTIVE: an error on one rank is returned on all. NotFound names all
  // places.
  absl::StatusOr<std::string> Find(const std::string& path,
                                   const std::string& flag) const;
  // The group of all ranks.
  Communicator& comm() const { return *world->communicator(); }
};

// Starts a program: reads its flags (absl's, Init's, --config, --set and
// --help), reads the configuration, and calls Init, which starts the ranks of
// --world=N. First in main. Afterwards argv has the words that are no flags.
//
//   --config=FILE     the configuration
//   --set KEY=VALUE   replaces a key of it, or adds it (ConfigOverrides in
//                     config/config.h); any number of times
//   --help            lists the flags that are defined in the folder of `file`,
//                     Init's and these; --helpfull those of all files
//
// Ends the process (ProcessEnd::kUsage) after --help with code 0, and after an
// unknown flag, a value that does not fit its flag or an error of `flags_read`
// with code 2 and one line on stderr. That, and errors of the configuration
// with --world=N, come before ranks are started, and so once; in ranks of
// another launcher an error of the configuration is returned on all. A program
// that defines an absl flag named "config" gets the path by it; one with a name
// of Init's is an error.
//
// COLLECTIVE, blocking, as Init. Returns the errors of Init and LoadConfig,
// NotFound with all places where the configuration was looked for, and
// InvalidArgument for options that exclude each other.
absl::StatusOr<StartedJob> Start(int* argc, char** argv,
                                 StartOptions options = {},
                                 const char* file = __builtin_FILE());

// Seeds libtorch's default generators of all devices: with `seed` now, so that
// models that are made next have the same initial values on all ranks, and with
// seed + 1 + rank at the end of the next Engine::Create, so that ranks draw
// different numbers afterwards (dropout, noise); the ranks of a tensor-parallel
// group draw the same. Call it before each model that
// gets an engine of its own. LOCAL.
void SeedAll(uint64_t seed, const World& world);

// Returns `options` with the values that the file's communication section sets,
// for a program that calls Init itself:
//
//   TESSERA_ASSIGN_OR_RETURN(auto options, WorldOptionsFrom("zero3.json"));
//   TESSERA_ASSIGN_OR_RETURN(auto* world, Init(&argc, argv, options));
//
// Without it Engine::Create refuses a configuration whose communication section
// differs from what the world was made with. Other sections are not looked at;
// the other arguments are those of LoadConfig. LOCAL. Errors: NotFound,
// InvalidArgument.
absl::StatusOr<WorldOptions> WorldOptionsFrom(
    const std::string& config_path, WorldOptions options = {},
    bool ignore_unknown = false, const ConfigOverrides& overrides = {});

// Runs `run` as the main function of a program, and returns the exit code: 0,
// or 1 for an error, which is written to stderr as "program: CODE: message".
// Exceptions of libtorch are errors, too (base/torch_guard.h). Rank 0 warns of
// an engine that has trained and was not closed, unless there is an error.
// stdout is written line by line, so that a run that is ended loses none. Calls
// Shutdown.
int RunMain(int argc, char** argv, absl::Status (*run)(int argc, char** argv));

// Defines main, which is RunMain of `run`. Once in a program, outside of
// namespaces.
#define TESSERA_MAIN(run)                       \
  int main(int argc, char** argv) {             \
    return ::tessera::RunMain(argc, argv, run); \
  }

}  // namespace tessera
#endif  // ENGINE_PROGRAM_START_H_
