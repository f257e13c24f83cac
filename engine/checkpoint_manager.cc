#include "engine/checkpoint_manager.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/disk/file_system.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "checkpoint/local_folders.h"
#include "config/config.pb.h"
#include "engine/checkpoint_manager_options.h"
#include "engine/run/best_metric.h"
#include "engine/run/run_folder.h"
#include "engine/run/save_room.h"
#include "engine/run/stop_signals.h"

namespace tessera {
namespace {

constexpr char kWhere[] = "CheckpointManager";

// Whether the manager saves without being told to, but for signals.
bool SavesByItself(const CheckpointManagerOptions& options) {
  return *options.every_steps > 0 || *options.every > absl::ZeroDuration() ||
         *options.mean_time_between_failures > absl::ZeroDuration() ||
         *options.keep_best;
}

// Begins the names of signals (StopSignals::name).
constexpr char kSignal[] = "SIG";

// Returns the number of ranks if none was told by a signal to end.
size_t FirstToldToEnd(const std::vector<std::string>& wanted) {
  size_t rank = 0;
  while (rank < wanted.size() && !absl::StartsWith(wanted[rank], kSignal)) {
    ++rank;
  }
  return rank;
}

}  // namespace

CheckpointManager::CheckpointManager(Engine* engine,
                                     std::shared_ptr<Communicator> comm,
                                     CheckpointManagerOptions options)
    : engine_(engine),
      comm_(std::move(comm)),
      options_(std::move(options)),
      best_(std::make_unique<BestMetric>(
          BestMetricOptions{*options_.larger_is_better, *options_.min_delta})),
      last_save_(options_.clock()) {
  if (*options_.on_signals) signals_ = StopSignals::Catch();
}

// An error is in the log.
CheckpointManager::~CheckpointManager() { engine_->SettleCheckpoint(); }

absl::StatusOr<std::unique_ptr<CheckpointManager>> CheckpointManager::Create(
    Engine* engine, CheckpointManagerOptions options) {
  const std::shared_ptr<Communicator>& comm = engine->communicator();
  engine->NoteManaged();
  options = CompletedOptions(std::move(options), engine->config().checkpoint());
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(CheckOptions(options), kWhere));
  TESSERA_RETURN_IF_ERROR(
      comm->AgreeEqual(TextOf(options), "CheckpointManagerOptions"));
  // Ranks in different working folders stay with the text: a folder of each
  // host's own has the same one everywhere.
  std::error_code error;
  const std::string whole =
      std::filesystem::absolute(options.dir, error).string();
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      comm->AllGatherStrings(error ? options.dir : whole,
                             CommTag{"CheckpointManager's folder"}));
  if (std::count(all.begin(), all.end(), all[0]) ==
      static_cast<int64_t>(all.size())) {
    options.dir = all[0];
  }
  std::unique_ptr<CheckpointManager> manager(
      new CheckpointManager(engine, comm, std::move(options)));
  TESSERA_ASSIGN_OR_RETURN(
      RunFolder folder, TakeRunFolder({manager->options_.dir, manager->Holds(),
                                       manager->options_.wait_for_folder,
                                       SavesByItself(manager->options_)},
                                      comm.get()));
  manager->folder_ = std::make_unique<RunFolder>(std::move(folder));
  manager->room_ = std::make_unique<SaveRoom>(
      comm, SaveRoomOptions{manager->options_.dir, manager->folder_->leads,
                            manager->Holds(), *manager->options_.retry_for});
  return manager;
}

absl::StatusOr<std::vector<std::string>> CheckpointManager::Candidates() {
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<RunStep> found,
      ListRunSteps(options_.dir, Holds(), kWhere, comm_.get()));
  newest_micros_ = std::max<int64_t>(newest_micros_, 0);
  std::vector<std::string> names;
  for (const RunStep& one : found) {
    newest_micros_ = std::max(newest_micros_, one.saved_unix_micros);
    names.push_back(StepFolderName(one.step));
  }
  return names;
}

FolderHolds CheckpointManager::Holds() const {
  return options_.node_local.value_or(engine_->node_local_checkpoints())
             ? FolderHolds::kPart
             : FolderHolds::kAll;
}

absl::StatusOr<std::optional<std::string>> CheckpointManager::Resume(
    std::optional<int64_t> step) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> all, Candidates());
  std::vector<std::string> names = all;
  if (step.has_value()) {
    const std::string wanted = StepFolderName(*step);
    names.assign(
        static_cast<size_t>(std::count(all.begin(), all.end(), wanted)),
        wanted);
  }
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
      seen_updates_ = engine_->updates();
      last_ = std::make_shared<LastSave>(
          LastSave{engine_->step(), name, /*ended=*/true, {}});
      good_ = name;
      TESSERA_RETURN_IF_ERROR(ResumeBest(loaded->manager_state, all));
      last_save_ = options_.clock();
      return std::optional<std::string>(std::move(loaded->client_state));
    }
    failed.Update(loaded.status());
    // Damage is a reason to go back; another model, say, is none.
    if (!absl::IsDataLoss(loaded.status()) &&
        !absl::IsNotFound(loaded.status())) {
      return loaded.status();
    }
    passed_over_[name] = loaded.status();
    TESSERA_LOG_RANK0(ERROR) << "passed over: " << loaded.status().message();
  }
  if (step.has_value()) return failed;
  return absl::Status(
      failed.code(),
      absl::StrCat(failed.message(), "; none of the ", names.size(),
                   " checkpoints in ", options_.dir,
                   " is whole: to start from nothing, remove them ('tessera "
                   "checkpoint rm')"));
}

// The name of a signal, "save" or "", by this rank's lights.
std::string CheckpointManager::Wanted() {
  if (signals_ != nullptr && signals_->received() != 0) {
    return signals_->name();
  }
  if (comm_->rank() != 0) return "";
  if (!engine_->saving_checkpoint() && room_->IsTimeAgain(HowLastEnded())) {
    return "save";
  }
  // Without a save there is nothing to calculate an interval from.
  const bool first =
      *options_.mean_time_between_failures > absl::ZeroDuration() &&
      saves_ == 0;
  const absl::Duration interval = Interval();
  const bool due = interval > absl::ZeroDuration() &&
                   options_.clock() - last_save_ >= interval;
  return first || due ? "save" : "";
}

// To ask for step() would wait for the device, so that comes last.
bool CheckpointManager::IsStepToSave() const {
  const int64_t step = engine_->step_at_most();
  return *options_.every_steps > 0 && step > 0 &&
         step % *options_.every_steps == 0 && step == engine_->step();
}

absl::StatusOr<bool> CheckpointManager::MaybeSave(
    const ClientState& client_state) {
  const int64_t updates = engine_->updates();
  if (updates == std::exchange(seen_updates_, updates)) {
    return false;  // within a step
  }
  bool save = IsStepToSave();
  std::string cause;  // that ends the run, and where it was seen first
  if (*options_.on_signals || *options_.every > absl::ZeroDuration() ||
      *options_.mean_time_between_failures > absl::ZeroDuration()) {
    TESSERA_ASSIGN_OR_RETURN(
        const std::vector<std::string> all,
        comm_->AllGatherStrings(Wanted(), CommTag{"is it time to save"}));
    const size_t told = FirstToldToEnd(all);
    if (told < all.size()) {
      cause =
          told == 0 ? all[told] : absl::StrCat(all[told], " at rank ", told);
    }
    save |= all[0] == "save";
  }
  const bool stop = !cause.empty();
  if (stop || save) {
    TESSERA_RETURN_IF_ERROR(SaveAs(client_state, /*wait=*/stop));
  }
  if (stop) {
    TESSERA_LOG_RANK0(INFO)
        << cause << ": step " << engine_->step() << " is saved in "
        << options_.dir << ", and the run ends";
    LogReport();
  }
  return stop;
}

absl::Status CheckpointManager::Save(const ClientState& client_state) {
  return SaveAs(client_state, /*wait=*/false);
}

absl::Status CheckpointManager::Finish(const ClientState& client_state) {
  TESSERA_RETURN_IF_ERROR(SaveAs(client_state, /*wait=*/true));
  LogReport();
  return absl::OkStatus();
}

// By this manager, or it is loaded from there; waits until it is certain. That
// a save has failed, on any rank, is no reason not to save again: this may be
// the last chance.
bool CheckpointManager::IsSaved() {
  if (last_->step != engine_->step()) return false;
  engine_->SettleCheckpoint();
  const absl::Status status = comm_->AgreeOk(last_->status, kWhere);
  if (status.ok()) return true;
  TESSERA_LOG_RANK0(ERROR) << "saving again, since the last one failed: "
                           << status.message();
  return false;
}

SaveOptions CheckpointManager::OptionsOf(const std::string& name, bool wait) {
  SaveOptions options;
  // A save that is waited for needs no copies.
  options.async = wait ? std::optional<bool>(false) : options_.async;
  options.node_local = options_.node_local;
  // Where none takes another's place: what is there of this step was saved
  // before the run went back to an earlier one.
  options.replace = Holds() == FolderHolds::kPart;
  options.manager_state = StateOfBest();
  // What is saved later is newer, whichever host's clock says when.
  newest_micros_ =
      std::max(newest_micros_ + 1, absl::ToUnixMicros(absl::Now()));
  options.saved_unix_micros = newest_micros_;
  options.on_end = [last = last_](const absl::Status& status) {
    last->status = status;
    last->ended = true;
  };
  options.after_commit = [dir = options_.dir, name, holds = Holds(),
                          is_best = name == best_name_, before = best_before_,
                          retention = Kept(), manager = options_,
                          told = told_removal_] {
    FileSystem* const files = FileSystem::Real();
    const absl::Status best =
        is_best ? WriteBest(dir, name, files) : absl::OkStatus();
    Retention kept = retention;
    // It makes room for the best one before it, unless DIR/best names that.
    if (is_best && best.ok()) kept.keep.erase(before);
    std::vector<std::string> removed;
    // Also after an error: on a full disk it makes the room for the next.
    for (const absl::Status& status :
         {WriteLatest(dir, name, files), best,
          RemoveOldSteps(dir, name, kept, files, holds, &removed)}) {
      if (status.ok()) continue;
      TESSERA_LOG(WARNING) << name << " is saved, but " << status.message();
    }
    if (!removed.empty() && !told->exchange(true)) {
      TESSERA_LOG(INFO) << RemovalText(manager, removed);
    }
  };
  return options;
}

Retention CheckpointManager::Kept() const {
  Retention kept{*options_.keep_last, *options_.keep_every, {}, passed_over_};
  for (const std::string& name : {best_name_, best_before_}) {
    if (!name.empty()) kept.keep.insert(name);
  }
  return kept;
}

// This rank's news of it; OK if it is good, or there is none. Waits for one
// that is being written.
absl::Status CheckpointManager::HowLastEnded() {
  engine_->SettleCheckpoint();
  if (!last_->ended) return absl::OkStatus();
  if (last_->status.ok()) {
    good_ = last_->name;
    if (good_ == best_name_) ForgetBestBefore();
  }
  return last_->status;
}

absl::Status CheckpointManager::SaveAs(const ClientState& client_state,
                                       bool wait) {
  const absl::Duration begun = options_.clock();
  if (IsSaved()) return absl::OkStatus();
  const absl::StatusOr<std::string> words =
      CatchTorch("client_state", [&]() -> std::string {
        return client_state ? client_state() : std::string();
      });
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(words.status(), kWhere));
  if (newest_micros_ < 0) {
    const absl::Status looked = Candidates().status();
    if (!looked.ok()) TESSERA_LOG_RANK0(WARNING) << looked.message();
  }
  const std::string name = StepFolderName(engine_->step());
  const absl::Status before = HowLastEnded();
  // The last try costs, not the waits for a disk before it.
  const absl::Duration prepared = options_.clock() - begun;
  absl::Duration tried;
  TESSERA_RETURN_IF_ERROR(room_->Save(before, good_, Kept(), [&] {
    tried = options_.clock();
    passed_over_.erase(name);
    last_ = std::make_shared<LastSave>();
    last_->name = name;
    const absl::Status status = engine_->SaveCheckpoint(
        absl::StrCat(options_.dir, "/", name), *words, OptionsOf(name, wait));
    // Ranks that believe different things would call different collectives.
    const absl::Status agreed = comm_->AgreeOk(status, kWhere);
    return status.ok() ? agreed : status;
  }));
  last_->step = engine_->step();
  NoteCost(prepared + options_.clock() - tried);
  return absl::OkStatus();
}

}  // namespace tessera
