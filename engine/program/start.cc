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

constexpr char kInCodeName[] = "<code>";  // as ConfigFromJson

// Where the configuration comes from: a file, or, if `path` is empty, the
// program's code.
struct Source {
  std::string path;
  const StartOptions& options;

  absl::StatusOr<proto::Communication> Communication() const {
    if (!path.empty()) {
      return LoadCommunication(path, options.ignore_unknown, options.set);
    }
    if (options.training.has_value()) {
      return CommunicationOf(*options.training, options.set);
    }
    return ParseCommunication(options.config_json, kInCodeName,
                              options.ignore_unknown, options.set);
  }
  absl::StatusOr<proto::Config> Config(int ranks) const {
    if (!path.empty()) {
      return LoadConfig(path, ranks, options.auto_values,
                        options.ignore_unknown, options.set);
    }
    if (options.training.has_value()) {
      return ToConfig(*options.training, ranks, options.auto_values,
                      options.set);
    }
    return ParseConfig(options.config_json, kInCodeName, ranks,
                       options.auto_values, options.set);
  }
  // Returns the error of Config, and logs no notes.
  absl::Status Check(int ranks) const {
    if (path.empty()) return Config(ranks).status();
    TESSERA_ASSIGN_OR_RETURN(const std::string text, ReadConfigFile(path));
    const absl::StatusOr<ConfigReport> report =
        ReadConfig(text, path, ranks, options.auto_values,
                   options.ignore_unknown, options.set);
    if (report.ok() && report->faults.empty()) return absl::OkStatus();
    return Config(ranks).status();
  }
};

absl::StatusOr<std::string> ConfigPath(const Arguments& arguments,
                                       const StartOptions& options) {
  if (arguments.config.has_value()) {
    return FindConfigFile(*arguments.config, RunningProgram());
  }
  if (options.training.has_value() && !options.config_json.empty()) {
    return absl::InvalidArgumentError(
        "StartOptions: expected one configuration in the code, got training "
        "and "
        "config_json: TrainingConfig::json has room for the latter");
  }
  if (options.training.has_value() || !options.config_json.empty()) {
    return std::string();
  }
  if (!options.config.empty()) {
    return FindConfigFile(options.config, RunningProgram());
  }
  return absl::InvalidArgumentError(
      "no configuration: give its file with --config");
}

// A handler of ends may return.
absl::Status End(int code) {
  EndProcess(ProcessEnd::kUsage, code);
  return absl::CancelledError(
      absl::StrCat("the program ends with code ", code));
}

}  // namespace

// The order: what can be wrong without ranks is said before Init, which turns
// this process into their launcher, since after it each rank would say the
// same.
absl::StatusOr<StartedJob> Start(int* argc, char** argv, StartOptions options,
                                 const char* file) {
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
  Source source{"", options};
  if (options.reads_config) {
    TESSERA_ASSIGN_OR_RETURN(source.path, ConfigPath(*arguments, options));
    TESSERA_ASSIGN_OR_RETURN(const proto::Communication section,
                             source.Communication());
    TakeCommunication(section, &options.world);
    const int planned = arguments->plan_world;
    const int ranks = planned > 0 ? planned : arguments->world;
    if (ranks > 0) TESSERA_RETURN_IF_ERROR(source.Check(ranks));
  }
  std::vector<char*> words(argv, argv + *argc);
  words.push_back(nullptr);
  StartedJob job;
  TESSERA_ASSIGN_OR_RETURN(job.world, Init(argc, words.data(), options.world));
  *argc = 1;
  for (char* word : arguments->positional) argv[(*argc)++] = word;
  argv[*argc] = nullptr;
  if (options.reads_config) {
    const int planned = job.world->plan_world();
    absl::StatusOr<proto::Config> config =
        source.Config(planned > 0 ? planned : job.world->world_size());
    TESSERA_RETURN_IF_ERROR(
        job.comm().AgreeOk(config.status(), "configuration"));
    job.config = *std::move(config);
    job.config_path = source.path;
  }
  job.options = std::move(options);
  return job;
}

absl::StatusOr<proto::Config> StartedJob::Load(const std::string& path) const {
  const int planned = world->plan_world();
  const auto read = [&]() -> absl::StatusOr<proto::Config> {
    TESSERA_ASSIGN_OR_RETURN(const std::string found,
                             FindConfigFile(path, RunningProgram()));
    return Source{found, options}.Config(planned > 0 ? planned
                                                     : world->world_size());
  };
  absl::StatusOr<proto::Config> config = read();
  TESSERA_RETURN_IF_ERROR(comm().AgreeOk(config.status(), "configuration"));
  return config;
}

}  // namespace tessera
