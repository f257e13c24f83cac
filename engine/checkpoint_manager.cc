#include "engine/checkpoint_manager.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "checkpoint/format/checkpoint_folder.h"

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
      options.async.has_value() ? absl::StrCat(*options.async) : "unset",
      ", node_local ",
      options.node_local.has_value() ? absl::StrCat(*options.node_local)
                                     : "unset");
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

// What the folders hold, of all ranks that see different ones: of each step the
// last, whole if any says so. Names, those that are seen to be damaged last:
// their error says more than that there is no checkpoint.
absl::StatusOr<std::vector<std::string>> CheckpointManager::Candidates(
    std::optional<int64_t> step) const {
  // Of one folder rank 0's list is that of all: others may see it a moment
  // later.
  const FolderHolds holds = Holds();
  absl::StatusOr<std::vector<StepFolder>> found = std::vector<StepFolder>();
  if (holds == FolderHolds::kPart || comm_->rank() == 0) {
    found = ListStepFolders(options_.dir, FileSystem::Real(), holds);
  }
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(found.status(), kWhere));
  std::string mine;
  for (const StepFolder& one : *found) {
    if (step.has_value() && one.step != *step) continue;
    absl::StrAppend(&mine, one.name, " ", one.saved_unix_micros, " ",
                    one.whole ? 1 : 0, "\n");
  }
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      comm_->AllGatherStrings(mine, CommTag{"checkpoints to resume from"}));
  // Name -> (whole, time).
  std::map<std::string, std::pair<bool, int64_t>> known;
  for (const std::string& text : all) {
    for (absl::string_view line :
         absl::StrSplit(text, '\n', absl::SkipEmpty())) {
      const std::vector<std::string> words = absl::StrSplit(line, ' ');
      auto& [whole, micros] = known[words.at(0)];
      int64_t at = 0;
      if (absl::SimpleAtoi(words.at(1), &at)) micros = std::max(micros, at);
      whole |= words.at(2) == "1";
    }
  }
  std::vector<std::string> names;
  for (const auto& item : known) names.push_back(item.first);
  std::sort(names.begin(), names.end(),
            [&](const std::string& a, const std::string& b) {
              return std::tie(known.at(a), a) > std::tie(known.at(b), b);
            });
  return names;
}

FolderHolds CheckpointManager::Holds() const {
  return options_.node_local.value_or(engine_->node_local_checkpoints())
             ? FolderHolds::kPart
             : FolderHolds::kAll;
}

absl::StatusOr<std::optional<std::string>> CheckpointManager::Resume(
    std::optional<int64_t> step) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                           Candidates(step));
  if (names.empty()) {
    if (!step.has_value()) return std::optional<std::string>();
    return absl::NotFoundError(
        absl::StrCat(options_.dir, ": holds no checkpoint of step ", *step));
  }
  absl::Status failed;
  LoadCheckpointOptions load;
  load.node_local = options_.node_local;
  for (const std::string& name : names) {
    auto loaded =
        engine_->LoadCheckpoint(absl::StrCat(options_.dir, "/", name), load);
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

// Where none can take another's place: what is there of this step was saved
// before the run went back to an earlier one.
absl::Status CheckpointManager::MakeWay(const std::string& path) const {
  if (Holds() == FolderHolds::kAll) return absl::OkStatus();
  absl::Status removed = RemoveCheckpoint(path, FileSystem::Real());
  // Unavailable: another rank of this host is at it.
  if (absl::IsNotFound(removed) || absl::IsUnavailable(removed)) {
    removed = absl::OkStatus();
  }
  return comm_->AgreeOk(removed, kWhere);
}

// Waits for the save before. Its error, on any rank, is no reason not to save
// again: this may be the last chance.
void CheckpointManager::SettleLast() {
  const absl::Status last =
      comm_->AgreeOk(engine_->WaitForCheckpoint(), kWhere);
  if (last.ok()) return;
  saved_step_ = -1;
  TESSERA_LOG_RANK0(ERROR) << "saving again, since the last one failed: "
                           << last.message();
}

absl::Status CheckpointManager::SaveAs(const ClientState& client_state,
                                       bool wait) {
  const absl::Time begun = absl::Now();
  SettleLast();
  const int64_t step = engine_->step();
  if (step == saved_step_) return absl::OkStatus();
  const std::string name = StepFolderName(step);
  SaveOptions options;
  options.async = options_.async;
  options.node_local = options_.node_local;
  options.after_commit =
      [dir = options_.dir, name, holds = Holds(),
       retention = Retention{options_.keep_last, options_.keep_every}] {
        FileSystem* const files = FileSystem::Real();
        absl::Status status = WriteLatest(dir, name, files);
        if (status.ok()) {
          status = RemoveOldSteps(dir, name, retention, files, holds);
        }
        if (!status.ok()) {
          TESSERA_LOG(WARNING) << name << " is saved, but " << status.message();
        }
      };
  const std::string path = absl::StrCat(options_.dir, "/", name);
  TESSERA_RETURN_IF_ERROR(MakeWay(path));
  absl::Status status = engine_->SaveCheckpoint(
      path, client_state ? client_state() : std::string(), std::move(options));
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
