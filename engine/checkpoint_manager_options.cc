#include "engine/checkpoint_manager_options.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "config/config.pb.h"

namespace tessera {
namespace {

template <typename T>
void SetIfUnset(std::optional<T>* option, const T& value) {
  if (!option->has_value()) *option = value;
}

}  // namespace

CheckpointManagerOptions CompletedOptions(CheckpointManagerOptions options,
                                          const proto::Checkpoint& section) {
  if (options.dir.empty()) options.dir = section.folder();
  SetIfUnset<int64_t>(&options.every_steps, section.every_steps());
  SetIfUnset(&options.every, absl::Minutes(section.every_minutes()));
  SetIfUnset(&options.mean_time_between_failures,
             absl::Minutes(section.minutes_between_failures()));
  SetIfUnset(&options.on_signals, section.on_signals());
  SetIfUnset<int>(&options.keep_last, section.keep_last());
  SetIfUnset<int64_t>(&options.keep_every, section.keep_every());
  SetIfUnset(&options.larger_is_better, section.larger_is_better());
  SetIfUnset(&options.min_delta, section.min_delta());
  SetIfUnset<int64_t>(&options.patience, section.patience());
  SetIfUnset(&options.keep_best, section.keep_best());
  SetIfUnset(&options.retry_for, absl::Minutes(section.retry_minutes()));
  return options;
}

absl::Status CheckOptions(const CheckpointManagerOptions& options) {
  if (options.dir.empty()) {
    return absl::InvalidArgumentError(
        "CheckpointManager: there is no folder: set "
        "CheckpointManagerOptions::dir, or checkpoint.folder in the "
        "configuration");
  }
  if (*options.keep_last < 1 || *options.keep_every < 0 ||
      *options.every_steps < 0 || *options.every < absl::ZeroDuration() ||
      *options.mean_time_between_failures < absl::ZeroDuration() ||
      *options.retry_for < absl::ZeroDuration() ||
      options.wait_for_folder < absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        "CheckpointManager: keep_last must be at least 1, and keep_every, "
        "every_steps and times at least 0");
  }
  if (!(*options.min_delta >= 0) || *options.patience < 0) {
    return absl::InvalidArgumentError(
        "CheckpointManager: min_delta and patience must be at least 0");
  }
  return absl::OkStatus();
}

std::string TextOf(const CheckpointManagerOptions& options) {
  return absl::StrCat(
      options.dir, ", every ", *options.every_steps, " steps or ",
      absl::FormatDuration(*options.every), ", failures each ",
      absl::FormatDuration(*options.mean_time_between_failures), ", signals ",
      *options.on_signals, ", keep_last ", *options.keep_last, ", keep_every ",
      *options.keep_every,
      *options.larger_is_better ? ", larger is better" : "", ", min_delta ",
      *options.min_delta, ", patience ", *options.patience,
      *options.keep_best ? ", keep_best" : "", ", async ",
      options.async.has_value() ? absl::StrCat(*options.async) : "unset",
      ", node_local ",
      options.node_local.has_value() ? absl::StrCat(*options.node_local)
                                     : "unset",
      ", retry_for ", absl::FormatDuration(*options.retry_for),
      ", wait_for_folder ", absl::FormatDuration(options.wait_for_folder));
}

std::string RemovalText(const CheckpointManagerOptions& options,
                        const std::vector<std::string>& removed) {
  std::string text = absl::StrCat(
      options.dir, ": removed ", absl::StrJoin(removed, ", "), "; kept: the ",
      *options.keep_last == 1
          ? "last checkpoint"
          : absl::StrCat("last ", *options.keep_last, " checkpoints"),
      " (keep_last)");
  if (*options.keep_every > 0) {
    absl::StrAppend(&text, ", multiples of ", *options.keep_every,
                    " steps (keep_every)");
  }
  if (*options.keep_best) absl::StrAppend(&text, ", the best (keep_best)");
  return absl::StrCat(text, "; logged once");
}

}  // namespace tessera
