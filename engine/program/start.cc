#include "engine/program/start.h"

#include <cstdio>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/system/process_end.h"
#include "config/config_report.h"
#include "engine/program/arguments.h"
#include "engine/program/config_file.h"
#include "engine/program/world_options.h"

namespace tessera {
namespace {

constexpr char kInCode[] = "<code>";  // as ConfigFromJson

// A configuration's text, which is read once: a pipe has it no second time, and
// a file may change.
struct Source {
  std::string path;  // "": it is in the program's code
  std::string text;  // unused with `training`
  const TrainingConfig* training = nullptr;

  std::string name() const { return path.empty() ? kInCode : path; }
  absl::StatusOr<proto::Communication> Communication(
      const StartOptions& options) const {
    if (training != nullptr) return CommunicationOf(*training, options.set);
    return ParseCommunication(text, name(), options.ignore_unknown,
                              options.set);
  }
  absl::StatusOr<proto::Config> Config(int ranks, const StartOptions& options,
                                       ConfigNotes notes) const {
    if (training != nullptr) {
      return ToConfig(*training, ranks, options.auto_values, options.set);
    }
    return ParseConfig(text, name(), ranks, options.auto_values, options.set,
                       options.ignore_unknown, notes);
  }
};

absl::StatusOr<Source> SourceOfFile(const std::string& path) {
  Source source;
  TESSERA_ASSIGN_OR_RETURN(source.path, FindConfigFile(path, RunningProgram()));
  TESSERA_ASSIGN_OR_RETURN(source.text, ReadConfigFile(source.path));
  return source;
}

absl::StatusOr<Source> FindSource(const Arguments& arguments,
                                  const StartOptions& options) {
  // What --set says of the ranks' communication holds for every file.
  if (!options.reads_config) return Source{"", "{}"};
  if (arguments.config.has_value()) return SourceOfFile(*arguments.config);
  if (options.training.has_value() && !options.config_json.empty()) {
    return absl::InvalidArgumentError(
        "StartOptions: expected one configuration in the code, got training "
        "and config_json: TrainingConfig::json has room for the latter");
  }
  if (options.training.has_value()) return Source{"", "", &*options.training};
  if (!options.config_json.empty()) return Source{"", options.config_json};
  if (!options.config.empty()) return SourceOfFile(options.config);
  return absl::InvalidArgumentError(
      "no configuration: give its file with --config");
}

// Reads the configuration, and checks what can be checked without ranks.
absl::StatusOr<Source> ReadSource(const Arguments& arguments,
                                  StartOptions* options) {
  TESSERA_ASSIGN_OR_RETURN(Source source, FindSource(arguments, *options));
  TESSERA_ASSIGN_OR_RETURN(const proto::Communication section,
                           source.Communication(*options));
  TakeCommunication(section, &options->world);
  const int ranks =
      arguments.plan_world > 0 ? arguments.plan_world : arguments.world;
  if (options->reads_config && ranks > 0) {
    TESSERA_RETURN_IF_ERROR(
        source.Config(ranks, *options, ConfigNotes::kDropped).status());
  }
  return source;
}

int RanksOf(const World& world) {
  return world.plan_world() > 0 ? world.plan_world() : world.world_size();
}

// A handler of ends may return.
absl::Status End(int code) {
  EndProcess(ProcessEnd::kUsage, code);
  return absl::CancelledError(
      absl::StrCat("the program ends with code ", code));
}

}  // namespace

// The order: with --world what can be wrong without ranks is said before Init,
// which turns this process into their launcher, since each rank would say the
// same after it. Ranks of other launchers come to Init with it, and agree then:
// the others would wait there.
absl::StatusOr<StartedJob> Start(int* argc, char** argv, StartOptions options,
                                 const char* file) {
  if (*argc < 1) {
    return absl::InvalidArgumentError("Start: argv has no name of a program");
  }
  absl::StatusOr<Arguments> arguments =
      ReadArguments(*argc, argv, options, file);
  absl::Status usable = arguments.status();
  if (usable.ok() && !arguments->help.empty()) {
    std::fputs(arguments->help.c_str(), stdout);
    return End(0);
  }
  if (usable.ok() && options.flags_read) usable = options.flags_read(&options);
  if (!usable.ok()) {
    std::fprintf(stderr, "%s: %s\n", ProgramName(*argc, argv).c_str(),
                 std::string(usable.message()).c_str());
    return End(2);
  }
  options.set.insert(options.set.end(), arguments->set.begin(),
                     arguments->set.end());
  const absl::StatusOr<Source> source = ReadSource(*arguments, &options);
  if (!source.ok() && arguments->world > 0) return source.status();
  std::vector<char*> words(argv, argv + *argc);
  words.push_back(nullptr);
  StartedJob job;
  const auto world = Init(argc, words.data(), options.world);
  if (!world.ok()) return source.ok() ? world.status() : source.status();
  job.world = *world;
  *argc = 1;
  for (char* word : arguments->positional) argv[(*argc)++] = word;
  argv[*argc] = nullptr;
  // A rank whose configuration is faulty has come, so that all learn of it.
  absl::StatusOr<proto::Config> config = proto::Config();
  if (!source.ok()) {
    config = source.status();
  } else if (options.reads_config) {
    config = source->Config(RanksOf(*job.world), options, ConfigNotes::kLogged);
  }
  TESSERA_RETURN_IF_ERROR(job.comm().AgreeOk(config.status(), "configuration"));
  job.config = *std::move(config);
  job.config_path = source->path;
  job.options = std::move(options);
  return job;
}

absl::StatusOr<proto::Config> StartedJob::Load(const std::string& path) const {
  const auto read = [&]() -> absl::StatusOr<proto::Config> {
    TESSERA_ASSIGN_OR_RETURN(const Source source, SourceOfFile(path));
    return source.Config(RanksOf(*world), options, ConfigNotes::kLogged);
  };
  absl::StatusOr<proto::Config> config = read();
  TESSERA_RETURN_IF_ERROR(comm().AgreeOk(config.status(), "configuration"));
  return config;
}

absl::StatusOr<std::string> StartedJob::Find(const std::string& path,
                                             const std::string& flag) const {
  absl::StatusOr<std::string> found =
      FindProgramFile(path, RunningProgram(), flag);
  TESSERA_RETURN_IF_ERROR(
      comm().AgreeOk(found.status(), absl::StrCat("--", flag)));
  return found;
}

}  // namespace tessera
