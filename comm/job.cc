#include "comm/job.h"

#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/env.h"
#include "base/status.h"

namespace tessera {
namespace {

constexpr int kMaxWorldSize = 1 << 20;

absl::Status FlagError(absl::string_view flag, absl::string_view expected,
                       absl::string_view value) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": expected ", expected, ", got '", value, "'"));
}

absl::StatusOr<int> ParseInt(absl::string_view flag, absl::string_view value,
                             int min) {
  int result = 0;
  if (!absl::SimpleAtoi(value, &result) || result < min ||
      result > kMaxWorldSize) {
    return FlagError(flag, absl::StrCat("an integer from ", min, " on"), value);
  }
  return result;
}

// True if `arg` is one of ours, whose value is then in `flags`.
absl::StatusOr<bool> ReadFlag(absl::string_view arg, JobFlags* flags) {
  if (!absl::ConsumePrefix(&arg, "--")) return false;
  const size_t equals = arg.find('=');
  const absl::string_view name = arg.substr(0, equals);
  const absl::string_view value = equals == absl::string_view::npos
                                      ? absl::string_view()
                                      : arg.substr(equals + 1);
  if (name == "world") {
    TESSERA_ASSIGN_OR_RETURN(flags->world, ParseInt(name, value, 1));
  } else if (name == "rank") {
    TESSERA_ASSIGN_OR_RETURN(flags->rank, ParseInt(name, value, 0));
  } else if (name == "world_size") {
    TESSERA_ASSIGN_OR_RETURN(flags->world_size, ParseInt(name, value, 1));
  } else if (name == "startup_timeout") {
    double seconds = 0;
    if (!absl::SimpleAtod(value, &seconds) || !(seconds > 0)) {
      return FlagError(name, "a positive number of seconds", value);
    }
    flags->startup_timeout = absl::Seconds(seconds);
  } else if (name == "rendezvous") {
    if (value.empty()) {
      return FlagError(name, "env://, tcp://host:port or file:///path", value);
    }
    flags->rendezvous = std::string(value);
  } else {
    return false;
  }
  return true;
}

// The flag's value, or the variable's.
absl::StatusOr<int> FlagOrVariable(std::optional<int> flag,
                                   const char* flag_name, const char* variable,
                                   int min) {
  if (flag.has_value()) return *flag;
  TESSERA_ASSIGN_OR_RETURN(std::optional<int64_t> value,
                           EnvInt64(variable, {min, kMaxWorldSize}));
  if (value.has_value()) return static_cast<int>(*value);
  return absl::InvalidArgumentError(
      absl::StrCat(variable, " is missing: set it, or give --", flag_name));
}

absl::StatusOr<std::string> EnvRendezvous() {
  const std::optional<std::string> host = EnvString("MASTER_ADDR");
  if (!host.has_value()) {
    return absl::InvalidArgumentError(
        "MASTER_ADDR is missing: env:// needs rank 0's host there");
  }
  TESSERA_ASSIGN_OR_RETURN(std::optional<int64_t> port,
                           EnvInt64("MASTER_PORT", {1, 65535}));
  if (!port.has_value()) {
    return absl::InvalidArgumentError(
        "MASTER_PORT is missing: env:// needs rank 0's port there");
  }
  return absl::StrCat("tcp://", *host, ":", *port);
}

}  // namespace

absl::StatusOr<JobFlags> TakeJobFlags(int* argc, char** argv) {
  JobFlags flags;
  std::vector<char*> rest;
  int i = 0;
  if (*argc > 0) rest.push_back(argv[i++]);
  for (; i < *argc && absl::string_view(argv[i]) != "--"; ++i) {
    TESSERA_ASSIGN_OR_RETURN(const bool ours, ReadFlag(argv[i], &flags));
    if (!ours) rest.push_back(argv[i]);
  }
  for (; i < *argc; ++i) rest.push_back(argv[i]);
  *argc = static_cast<int>(rest.size());
  for (i = 0; i < *argc; ++i) argv[i] = rest[i];
  argv[*argc] = nullptr;
  return flags;
}

absl::StatusOr<Job> FindJob(const JobFlags& flags, bool launched) {
  Job job;
  const bool told = launched || flags.rendezvous.has_value() ||
                    flags.rank.has_value() || flags.world_size.has_value() ||
                    EnvString("RANK").has_value() ||
                    EnvString("WORLD_SIZE").has_value();
  if (!told || (flags.world.has_value() && !launched)) return job;
  TESSERA_ASSIGN_OR_RETURN(
      job.world_size,
      FlagOrVariable(flags.world_size, "world_size", "WORLD_SIZE", 1));
  TESSERA_ASSIGN_OR_RETURN(job.rank,
                           FlagOrVariable(flags.rank, "rank", "RANK", 0));
  if (job.rank >= job.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.rank.has_value() ? "--rank" : "RANK", " is ",
                     job.rank, ", expected 0 to ", job.world_size - 1,
                     " (the world size is ", job.world_size, ")"));
  }
  if (job.world_size == 1) return job;
  job.rendezvous = flags.rendezvous.value_or("env://");
  if (job.rendezvous == "env://") {
    TESSERA_ASSIGN_OR_RETURN(job.rendezvous, EnvRendezvous());
    // torchrun's agent hosts the store itself and says so.
    TESSERA_ASSIGN_OR_RETURN(std::optional<bool> agent,
                             EnvBool("TORCHELASTIC_USE_AGENT_STORE"));
    job.store_hosted = launched || agent.value_or(false);
    if (!launched) {
      job.attempt = EnvString("TORCHELASTIC_RESTART_COUNT").value_or("");
    }
  }
  return job;
}

std::string HostId() {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return absl::StrCat(boot_id, " ", name);
}

}  // namespace tessera
