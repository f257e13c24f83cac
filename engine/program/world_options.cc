#include "engine/program/world_options.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "config/config.h"
#include "engine/program/start.h"

namespace tessera {
namespace {

absl::Status Differs(absl::string_view key, absl::string_view configured,
                     absl::string_view made) {
  return absl::InvalidArgumentError(
      absl::StrCat("communication.", key, ": the configuration says '",
                   configured, "', the world was made with '", made,
                   "'; pass WorldOptionsFrom(path) to Init"));
}

}  // namespace

void TakeCommunication(const proto::Communication& communication,
                       WorldOptions* options) {
  if (communication.has_backend()) options->backend = communication.backend();
  if (communication.has_timeout_seconds()) {
    options->collective_timeout =
        absl::Seconds(communication.timeout_seconds());
  }
  if (communication.has_startup_timeout_seconds()) {
    options->startup_timeout =
        absl::Seconds(communication.startup_timeout_seconds());
  }
  for (const auto& setting : communication.nccl()) {
    options->nccl_environment[setting.first] = setting.second;
  }
}

absl::StatusOr<WorldOptions> WorldOptionsFrom(
    const std::string& config_path, WorldOptions options, bool ignore_unknown,
    const ConfigOverrides& overrides) {
  TESSERA_ASSIGN_OR_RETURN(
      const proto::Communication communication,
      LoadCommunication(config_path, ignore_unknown, overrides));
  TakeCommunication(communication, &options);
  return options;
}

absl::Status CheckCommunication(const proto::Communication& communication,
                                const WorldOptions& options) {
  if (communication.has_backend() &&
      communication.backend() != options.backend) {
    return Differs("backend", communication.backend(), options.backend);
  }
  const absl::Duration timeout = absl::Seconds(communication.timeout_seconds());
  if (communication.has_timeout_seconds() &&
      timeout != options.collective_timeout) {
    return Differs("timeout_seconds", absl::FormatDuration(timeout),
                   absl::FormatDuration(options.collective_timeout));
  }
  for (const auto& setting : communication.nccl()) {
    const auto made = options.nccl_environment.find(setting.first);
    if (made == options.nccl_environment.end() ||
        made->second != setting.second) {
      return Differs(absl::StrCat("nccl.", setting.first), setting.second,
                     made == options.nccl_environment.end()
                         ? absl::string_view()
                         : made->second);
    }
  }
  return absl::OkStatus();
}

}  // namespace tessera
