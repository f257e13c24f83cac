#include "comm/launch/job.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/edit_distance.h"
#include "base/status.h"

namespace tessera {
namespace {

absl::Status FlagError(absl::string_view flag, absl::string_view expected,
                       absl::string_view value) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": expected ", expected, ", got '", value, "'"));
}

absl::StatusOr<int> ParseInt(absl::string_view flag, absl::string_view value,
                             int min, int max) {
  int result = 0;
  if (!absl::SimpleAtoi(value, &result) || result < min || result > max) {
    return FlagError(flag, absl::StrCat("an integer from ", min, " to ", max),
                     value);
  }
  return result;
}

absl::StatusOr<PrefixOutput> ParsePrefix(absl::string_view flag,
                                         absl::string_view value) {
  if (value == "auto") return PrefixOutput::kAuto;
  if (value == "on") return PrefixOutput::kOn;
  if (value == "off") return PrefixOutput::kOff;
  return FlagError(flag, "auto, on or off", value);
}

using ReadValue = absl::Status (*)(absl::string_view name,
                                   absl::string_view value, JobFlags* flags);

template <std::optional<int> JobFlags::*kField, int kMin, int kMax>
absl::Status ReadInt(absl::string_view name, absl::string_view value,
                     JobFlags* flags) {
  TESSERA_ASSIGN_OR_RETURN(flags->*kField, ParseInt(name, value, kMin, kMax));
  return absl::OkStatus();
}

absl::Status ReadRendezvous(absl::string_view name, absl::string_view value,
                            JobFlags* flags) {
  if (value.empty()) {
    return FlagError(name, "env://, tcp://host:port or file:///path", value);
  }
  flags->rendezvous = std::string(value);
  return absl::OkStatus();
}

absl::Status ReadPrefix(absl::string_view name, absl::string_view value,
                        JobFlags* flags) {
  TESSERA_ASSIGN_OR_RETURN(flags->prefix_output, ParsePrefix(name, value));
  return absl::OkStatus();
}

absl::Status ReadGrace(absl::string_view name, absl::string_view value,
                       JobFlags* flags) {
  double seconds = 0;
  if (!absl::SimpleAtod(value, &seconds) || !(seconds >= 0)) {
    return FlagError(name, "a number of seconds, at least 0", value);
  }
  flags->grace = absl::Seconds(seconds);
  return absl::OkStatus();
}

absl::Status ReadStartupTimeout(absl::string_view name, absl::string_view value,
                                JobFlags* flags) {
  double seconds = 0;
  if (!absl::SimpleAtod(value, &seconds) || !(seconds > 0)) {
    return FlagError(name, "a positive number of seconds", value);
  }
  flags->startup_timeout = absl::Seconds(seconds);
  return absl::OkStatus();
}

absl::Status ReadBinding(absl::string_view name, absl::string_view value,
                         JobFlags* flags) {
  if (value != "node" && value != "off") {
    return FlagError(name, "node or off", value);
  }
  flags->numa_binding = value == "node";
  return absl::OkStatus();
}

// A flag is read where it is described, so that --help has all of them.
const struct FlagRow {
  JobFlagHelp help;
  ReadValue read;
} kFlags[] = {
    {{"world", "N", "Start N ranks on this host."},
     ReadInt<&JobFlags::world, 1, kMaxWorldSize>},
    {{"grace", "SECONDS",
      "Time that ranks of --world have to end after a signal. Default: 10; "
      "inf: no limit."},
     ReadGrace},
    {{"prefix_output", "auto|on|off",
      "Lines of ranks that begin with [rank]: auto (default) stderr, on also "
      "stdout, off none."},
     ReadPrefix},
    {{"rank", "R", "Number of this rank. Default: what the launcher says."},
     ReadInt<&JobFlags::rank, 0, kMaxWorldSize - 1>},
    {{"world_size", "W", "Number of ranks. Default: what the launcher says."},
     ReadInt<&JobFlags::world_size, 1, kMaxWorldSize>},
    {{"rendezvous", "URL",
      "Where ranks meet: env:// (default), tcp://host:port or file:///path."},
     ReadRendezvous},
    {{"startup_timeout", "SECONDS",
      "Time in which all ranks have to come. Default: 60."},
     ReadStartupTimeout},
    {{"numa_binding", "node|off",
      "Bind each rank to its share of the host's memory nodes. Default: off."},
     ReadBinding},
    {{"plan_world", "N",
      "Print what each of N ranks would hold, and end without training."},
     ReadInt<&JobFlags::plan_world, 1, kMaxWorldSize>},
};

// How many arguments are one of our flags, whose value is then in `flags`:
// --name=value, or --name and `next`.
absl::StatusOr<int> ReadFlag(absl::string_view arg, absl::string_view next,
                             JobFlags* flags) {
  if (!absl::ConsumePrefix(&arg, "--")) return 0;
  const size_t equals = arg.find('=');
  const absl::string_view name = arg.substr(0, equals);
  const bool apart = equals == absl::string_view::npos &&
                     !absl::StartsWith(next, "--") && !next.empty();
  const absl::string_view value = equals != absl::string_view::npos
                                      ? arg.substr(equals + 1)
                                  : apart ? next
                                          : absl::string_view();
  for (const FlagRow& row : kFlags) {
    if (name != row.help.name) continue;
    TESSERA_RETURN_IF_ERROR(row.read(name, value, flags));
    return apart ? 2 : 1;
  }
  return 0;
}

// The flag's value, or the launcher's.
absl::StatusOr<int> FlagOrVariable(std::optional<int> flag,
                                   absl::string_view flag_name,
                                   std::optional<int> value,
                                   absl::string_view variable) {
  if (flag.has_value()) return *flag;
  if (value.has_value()) return *value;
  return absl::InvalidArgumentError(
      absl::StrCat(variable, " is missing: set it, or give --", flag_name));
}

// MASTER_ADDR and MASTER_PORT, or what the launcher's word gives for them.
absl::StatusOr<std::string> EnvRendezvous(const Variables& variables,
                                          const Placement& p) {
  const std::string host = Find(variables, "MASTER_ADDR").value_or(p.host);
  if (host.empty()) return absl::InvalidArgumentError(p.host_missing);
  TESSERA_ASSIGN_OR_RETURN(std::optional<int> port,
                           FindInt(variables, "MASTER_PORT", 1, 65535));
  if (!port.has_value() && !p.job_id.empty()) port = DerivedPort(p.job_id);
  if (!port.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "MASTER_PORT is missing: env:// needs rank 0's port there",
        p.launcher == "torchrun" ? ""
                                 : absl::StrCat(", and ", p.launcher,
                                                " gives no id of the job to "
                                                "derive one from")));
  }
  return absl::StrCat("tcp://", host, ":", *port);
}

// True, false or absent, as torchrun's agent writes it.
absl::StatusOr<bool> AgentHostsStore(const Variables& variables) {
  constexpr char kName[] = "TORCHELASTIC_USE_AGENT_STORE";
  const std::string text = Find(variables, kName).value_or("false");
  bool value = false;
  if (absl::SimpleAtob(text, &value)) return value;
  return absl::InvalidArgumentError(
      absl::StrCat("environment variable ", kName,
                   ": expected True or False, got '", text, "'"));
}

absl::Status FindMeetingPlace(const JobFlags& flags, const JobSources& sources,
                              const Placement& placement, Job* job) {
  job->rendezvous = flags.rendezvous.value_or("env://");
  const bool by_environment = job->rendezvous == "env://";
  if (by_environment) {
    TESSERA_ASSIGN_OR_RETURN(job->rendezvous,
                             EnvRendezvous(sources.variables, placement));
  }
  if (sources.launched) {
    job->store_hosted = by_environment;
  } else if (placement.launcher != "torchrun") {
    job->attempt = placement.job_id;
  } else if (by_environment) {
    // torchrun's agent hosts the store itself and says so.
    TESSERA_ASSIGN_OR_RETURN(job->store_hosted,
                             AgentHostsStore(sources.variables));
    job->attempt =
        Find(sources.variables, "TORCHELASTIC_RESTART_COUNT").value_or("");
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<JobFlagHelp> AllJobFlags() {
  std::vector<JobFlagHelp> all;
  for (const FlagRow& row : kFlags) all.push_back(row.help);
  return all;
}

absl::StatusOr<JobFlags> TakeJobFlags(int* argc, char** argv) {
  JobFlags flags;
  std::vector<char*> rest;
  int i = 0;
  if (*argc > 0) rest.push_back(argv[i++]);
  while (i < *argc && absl::string_view(argv[i]) != "--") {
    const char* const next = i + 1 < *argc ? argv[i + 1] : "";
    TESSERA_ASSIGN_OR_RETURN(const int taken, ReadFlag(argv[i], next, &flags));
    if (taken == 0) rest.push_back(argv[i]);
    i += std::max(taken, 1);
  }
  for (; i < *argc; ++i) rest.push_back(argv[i]);
  *argc = static_cast<int>(rest.size());
  for (i = 0; i < *argc; ++i) argv[i] = rest[i];
  argv[*argc] = nullptr;
  return flags;
}

std::string MisspeltJobFlag(int argc, char* const* argv) {
  for (int i = 1; i < argc && absl::string_view(argv[i]) != "--"; ++i) {
    absl::string_view name = argv[i];
    if (!absl::ConsumePrefix(&name, "-")) continue;
    absl::ConsumePrefix(&name, "-");
    const std::string meant = NearestName(
        name.substr(0, name.find('=')), {"world", "world_size", "rendezvous"});
    if (meant.empty()) continue;
    return absl::StrCat("'", argv[i], "' (did you mean --", meant, "?)");
  }
  return "";
}

JobSources SourcesOfThisProcess(bool launched) {
  return {EnvironmentVariables(), FindHydraProxy(), launched};
}

absl::StatusOr<Job> FindJob(const JobFlags& flags, const JobSources& sources) {
  Job job;
  if (flags.world.has_value() && !sources.launched) return job;
  const bool by_flags = flags.rendezvous.has_value() ||
                        flags.rank.has_value() || flags.world_size.has_value();
  TESSERA_ASSIGN_OR_RETURN(
      const std::optional<Placement> found,
      FindPlacement(sources.variables, sources.hydra_proxy));
  if (!found.has_value() && !by_flags) return job;
  Placement placement;
  placement.launcher = "flags";
  placement.rank_name = "RANK";
  placement.world_size_name = "WORLD_SIZE";
  placement.host_missing =
      "MASTER_ADDR is missing: env:// needs rank 0's host there";
  placement = found.value_or(placement);
  job.launcher = sources.launched ? "--world" : placement.launcher;
  TESSERA_ASSIGN_OR_RETURN(
      job.world_size,
      FlagOrVariable(flags.world_size, "world_size", placement.world_size,
                     placement.world_size_name));
  TESSERA_ASSIGN_OR_RETURN(
      job.rank,
      FlagOrVariable(flags.rank, "rank", placement.rank, placement.rank_name));
  if (job.rank >= job.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.rank.has_value() ? "--rank" : placement.rank_name,
                     " is ", job.rank, ", expected 0 to ", job.world_size - 1,
                     " (the world size is ", job.world_size, ")"));
  }
  if (job.world_size == 1) return job;
  TESSERA_RETURN_IF_ERROR(FindMeetingPlace(flags, sources, placement, &job));
  return job;
}

}  // namespace tessera
