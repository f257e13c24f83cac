#include "engine/checkpoint_manager.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "checkpoint/format/step_folders.h"

namespace tessera {
namespace {

constexpr char kWhere[] = "CheckpointManager";

absl::Status CheckOptions(const CheckpointManagerOptions& options) {
  if (options.dir.empty()) {
    return absl::InvalidArgumentError("CheckpointManager: dir is empty");
  }
  if (options.keep_last < 1 || options.keep_every < 0 ||
      options.every_steps < 0 || options.every < absl::ZeroDuration() ||
      options.mean_time_between_failures < absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        "CheckpointManager: keep_last must be at least 1, and keep_every, "
        "every_steps and times at least 0");
  }
  return absl::OkStatus();
}

std::string TextOf(const CheckpointManagerOptions& options) {
  return absl::StrCat(
      options.dir, ", every ", options.every_steps, " steps or ",
      absl::FormatDuration(options.every), ", failures each ",
      absl::FormatDuration(options.mean_time_between_failures), ", signals ",
      options.on_signals, ", keep_last ", options.keep_last, ", keep_every ",
      options.keep_every, ", async ",
      options.async.has_value() ? absl::StrCat(*options.async) : "unset");
}

}  // namespace

absl::Duration OptimalSaveInterval(absl::Duration save,
                                   absl::Duration mean_time_between_failures) {
  const double cost = absl::ToDoubleSeconds(save);
  const double mean = absl::ToDoubleSeconds(mean_time_between_failures);
  if (cost >= 2 * mean) return mean_time_between_failures;
  const double ratio = cost / (2 * mean);
  return absl::Seconds(std::sqrt(2 * cost * mean) *
                           (1 + std::sqrt(ratio) / 3 + ratio / 9) -
                       cost);
}

CheckpointManager::CheckpointManager(Engine* engine,
                                     std::shared_ptr<Communicator> comm,
                                     CheckpointManagerOptions options)
    : engine_(engine),
      comm_(std::move(comm)),
      options_(std::move(options)),
      last_save_(absl::Now()) {
  if (options_.on_signals) signals_ = StopSignals::Catch();
}

CheckpointManager::~CheckpointManager() {
  const absl::Status status = engine_->WaitForCheckpoint();
  if (!status.ok() && !absl::IsFailedPrecondition(status)) {
    TESSERA_LOG(ERROR) << status.message();
  }
}

absl::StatusOr<std::unique_ptr<CheckpointManager>> CheckpointManager::Create(
    Engine* engine, CheckpointManagerOptions options) {
  const std::shared_ptr<Communicator>& comm = engine->communicator();
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(CheckOptions(options), kWhere));
  TESSERA_RETURN_IF_ERROR(
      comm->AgreeEqual(TextOf(options), "CheckpointManagerOptions"));
  return std::unique_ptr<CheckpointManager>(
      new CheckpointManager(engine, comm, std::move(options)));
}

absl::StatusOr<std::optional<std::string>> CheckpointManager::Resume(
    std::optional<int64_t> step) {
  // Rank 0's list is that of all: others may see the folder a moment later.
  absl::StatusOr<std::vector<StepFolder>> found = std::vector<StepFolder>();
  if (comm_->rank() == 0) {
    found = ListStepFolders(options_.dir, FileSystem::Real());
  }
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(found.status(), kWhere));
  // What is seen to be damaged comes last: its error says more than that there
  // is no checkpoint.
  std::stable_partition(found->begin(), found->end(),
                        [](const StepFolder& one) { return one.whole; });
  std::vector<std::string> mine;
  for (const StepFolder& one : *found) {
    if (!step.has_value() || one.step == *step) mine.push_back(one.name);
  }
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      comm_->AllGatherStrings(absl::StrJoin(mine, " "),
                              CommTag{"checkpoints to resume from"}));
  const std::vector<std::string> names =
      absl::StrSplit(all[0], ' ', absl::SkipEmpty());
  if (names.empty()) {
    if (!step.has_value()) return std::optional<std::string>();
    return absl::NotFoundError(
        absl::StrCat(options_.dir, ": holds no checkpoint of step ", *step));
  }
  absl::Status failed;
  for (const std::string& name : names) {
    auto loaded =
        engine_->LoadCheckpoint(absl::StrCat(options_.dir, "/", name));
    if (loaded.ok()) {
      saved_step_ = seen_step_ = engine_->step();
      last_save_ = absl::Now();
      return std::optional<std::string>(std::move(loaded->client_state));
    }
    failed.Update(loaded.status());
    // Damage is a reason to go back; another model, say, is none.
    if (!absl::IsDataLoss(loaded.status()) &&
        !absl::IsNotFound(loaded.status())) {
      return loaded.status();
    }
    TESSERA_LOG_RANK0(ERROR) << "passed over: " << loaded.status().message();
  }
  return failed;
}

absl::Duration CheckpointManager::Interval() const {
  absl::Duration interval = options_.every;
  if (options_.mean_time_between_failures > absl::ZeroDuration() &&
      saves_ > 0) {
    const absl::Duration best = OptimalSaveInterval(
        cost_ / saves_, options_.mean_time_between_failures);
    interval =
        interval == absl::ZeroDuration() ? best : std::min(interval, best);
  }
  return interval;
}

// "stop", "save" or "", by this rank's lights.
std::string CheckpointManager::Wanted() const {
  if (signals_ != nullptr && signals_->received() != 0) return "stop";
  if (comm_->rank() != 0) return "";
  // Without a save there is nothing to calculate an interval from.
  const bool first =
      options_.mean_time_between_failures > absl::ZeroDuration() && saves_ == 0;
  const absl::Duration interval = Interval();
  const bool due =
      interval > absl::ZeroDuration() && absl::Now() - last_save_ >= interval;
  return first || due ? "save" : "";
}

absl::StatusOr<bool> CheckpointManager::MaybeSave(
    const ClientState& client_state) {
  const int64_t step = engine_->step();
  if (step == std::exchange(seen_step_, step)) return false;  // within a step
  bool save =
      options_.every_steps > 0 && step > 0 && step % options_.every_steps == 0;
  bool stop = false;
  if (options_.on_signals || options_.every > absl::ZeroDuration() ||
      options_.mean_time_between_failures > absl::ZeroDuration()) {
    TESSERA_ASSIGN_OR_RETURN(
        const std::vector<std::string> all,
        comm_->AllGatherStrings(Wanted(), CommTag{"is it time to save"}));
    stop = std::count(all.begin(), all.end(), "stop") > 0;
    save |= all[0] == "save";
  }
  if (stop || save) {
    TESSERA_RETURN_IF_ERROR(SaveAs(client_state, /*wait=*/stop));
  }
  return stop;
}

absl::Status CheckpointManager::Save(const ClientState& client_state) {
  return SaveAs(client_state, /*wait=*/false);
}

absl::Status CheckpointManager::Finish(const ClientState& client_state) {
  return SaveAs(client_state, /*wait=*/true);
}

absl::Status CheckpointManager::SaveAs(const ClientState& client_state,
                                       bool wait) {
  const int64_t step = engine_->step();
  if (step == saved_step_) {
    const absl::Status status =
        wait ? engine_->WaitForCheckpoint() : absl::OkStatus();
    if (!status.ok()) saved_step_ = -1;
    return status;
  }
  const std::string name = StepFolderName(step);
  SaveOptions options;
  options.async = options_.async;
  options.after_commit =
      [dir = options_.dir, name,
       retention = Retention{options_.keep_last, options_.keep_every}] {
        FileSystem* const files = FileSystem::Real();
        absl::Status status = WriteLatest(dir, name, files);
        if (status.ok()) status = RemoveOldSteps(dir, name, retention, files);
        if (!status.ok()) {
          TESSERA_LOG(WARNING) << name << " is saved, but " << status.message();
        }
      };
  const absl::Time begun = absl::Now();
  absl::Status status = engine_->SaveCheckpoint(
      absl::StrCat(options_.dir, "/", name),
      client_state ? client_state() : std::string(), std::move(options));
  if (status.ok() && wait) status = engine_->WaitForCheckpoint();
  if (!status.ok()) {
    saved_step_ = -1;
    return status;
  }
  saved_step_ = step;
  last_save_ = absl::Now();
  cost_ += last_save_ - begun;
  ++saves_;
  return absl::OkStatus();
}

std::string CheckpointManager::Report() const {
  if (saves_ == 0) return "no checkpoint saved";
  std::string report = absl::StrCat(
      saves_, saves_ == 1 ? " save, " : " saves, ",
      absl::FormatDuration(absl::Trunc(cost_ / saves_, absl::Milliseconds(1))),
      " each of the training's time");
  const absl::Duration interval = Interval();
  if (interval > absl::ZeroDuration()) {
    absl::StrAppend(
        &report, "; one in ",
        absl::FormatDuration(absl::Trunc(interval, absl::Seconds(1))));
  }
  return report;
}

}  // namespace tessera
