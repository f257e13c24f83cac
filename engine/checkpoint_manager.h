// CheckpointManager: when to save, under which name, and what to keep, in one
// line of a training loop.
//
//   CheckpointManagerOptions options;
//   options.dir = "run7";
//   options.every = absl::Minutes(10);
//   auto manager = *CheckpointManager::Create(engine.get(), options);
//   auto saved = *manager->Resume();             // nullopt: from the start
//   while (engine->step() < steps) {
//     ... forward, Backward, Step ...
//     // True: told to end.
//     if (*manager->MaybeSave([&] { return Position(); })) break;
//   }
//   manager->Finish([&] { return Position(); });
//
// The folder is one job's: from Create on it is locked (DIR/job.lock), until
// the manager or its process ends. Another job's Create is Unavailable at once,
// and says who has it.
//
// A folder per checkpoint, `dir`/step-00000120, and `dir`/latest, which names
// the newest (checkpoint/format/step_folders.h). DeepSpeed: save_checkpoint's
// tags and `latest`; Orbax: CheckpointManager. Several managers of one engine
// (tiers), and saves of the program's own beside them, know nothing of each
// other's errors.
//
// Threads: one, that of the engine's calls.
#ifndef ENGINE_CHECKPOINT_MANAGER_H_
#define ENGINE_CHECKPOINT_MANAGER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/monotonic.h"
#include "engine/engine.h"

namespace tessera {

enum class FolderHolds;  // checkpoint/format/step_folders.h
struct Retention;        // the same
struct RunFolder;        // engine/run_folder.h
class SaveRoom;          // engine/save_room.h
class StopSignals;       // engine/stop_signals.h

// The same on all ranks. Whatever comes first saves.
struct CheckpointManagerOptions {
  // A relative one is that of Create, wherever the program goes afterwards.
  std::string dir;
  // At steps that are multiples; 0: no.
  int64_t every_steps = 0;
  // When so much time has passed since the last, by rank 0's clock; 0: no.
  absl::Duration every = absl::ZeroDuration();
  // The job's, all hosts together. The interval is then Young's and Daly's
  // (J. W. Young, 1974; J. T. Daly, 2006), from this and what saves have cost
  // the training so far; the first is after the first step. 0: no.
  absl::Duration mean_time_between_failures = absl::ZeroDuration();
  // On SIGTERM or SIGUSR1 of any rank's process.
  bool on_signals = true;
  int keep_last = 2;  // at least 1
  // Steps that are multiples are never removed, and do not count for keep_last;
  // 0: none.
  int64_t keep_every = 0;
  std::optional<bool> async;       // as SaveOptions::async
  std::optional<bool> node_local;  // as SaveOptions::node_local
  // How long a save that finds the disk full is made again, with growing pauses
  // of up to 30 s: older checkpoints make room as far as they can, never the
  // newest whole one, nor those of keep_every. An async one is made again while
  // training goes on, where `every` or `on_signals` lets ranks meet each step.
  // 0: not at all.
  absl::Duration retry_for = absl::Minutes(5);
  // How long Create waits where another job still has the folder, as the one
  // before may while it ends; 0: an error at once.
  absl::Duration wait_for_folder = absl::ZeroDuration();
  Clock clock = MonotonicNow;  // of `every`, and of what saves cost
};

// Daly's interval between checkpoints that cost `save` each: his formula of
// higher order, and `mean_time_between_failures` where a save takes twice that
// or longer.
absl::Duration OptimalSaveInterval(absl::Duration save,
                                   absl::Duration mean_time_between_failures);

class CheckpointManager {
 public:
  // This rank's own bytes, given back by Resume. Called only when it is saved.
  using ClientState = std::function<std::string()>;

  // `engine` outlives this. Makes the folder. COLLECTIVE. InvalidArgument: no
  // folder, keep_last below 1, options that differ between ranks; Unavailable:
  // another job has the folder. Where a folder cannot be locked (it cannot be
  // written to, its file system has no locks) a warning says so.
  static absl::StatusOr<std::unique_ptr<CheckpointManager>> Create(
      Engine* engine, CheckpointManagerOptions options);
  // Waits for a save that is being written.
  ~CheckpointManager();

  // Loads the checkpoint that was saved last, or the one of `step`; nullopt if
  // there is none yet. One that is damaged is passed over, with an error in the
  // log, for the one before. NotFound: none of `step`; other errors as
  // Engine::LoadCheckpoint's. COLLECTIVE.
  absl::StatusOr<std::optional<std::string>> Resume(
      std::optional<int64_t> step = std::nullopt);

  // After each Step: saves if it is time to. True if the program should end,
  // having been told so by a signal: the state is saved then, and on the disk.
  // Errors as Engine::SaveCheckpoint's, the same on all ranks, except that of
  // an async save before, which goes to the log; and what `client_state`
  // throws. COLLECTIVE.
  absl::StatusOr<bool> MaybeSave(const ClientState& client_state = nullptr);
  // Saves now, unless this step is saved already. COLLECTIVE.
  absl::Status Save(const ClientState& client_state = nullptr);
  // At the end: as Save, and waits until it is on the disk. A save of this step
  // that has failed is made again. Report goes to the log. COLLECTIVE.
  absl::Status Finish(const ClientState& client_state = nullptr);

  // "3 saves, 0.8 s each of the training's time; one in 12m 5s". LOCAL.
  std::string Report() const;

 private:
  CheckpointManager(Engine* engine, std::shared_ptr<Communicator> comm,
                    CheckpointManagerOptions options);
  // How the last save of this manager ended. The engine may end it later than
  // the manager ends.
  struct LastSave {
    int64_t step = -1;
    std::string name;
    bool ended = false;
    absl::Status status;
  };

  absl::Status SaveAs(const ClientState& client_state, bool wait);
  absl::Status HowLastEnded();
  Retention Kept() const;
  bool IsSaved();
  SaveOptions OptionsOf(const std::string& name, bool wait);
  void NoteCost(absl::Duration cost);
  void LogReport();
  absl::StatusOr<std::vector<std::string>> Candidates(
      std::optional<int64_t> step);
  FolderHolds Holds() const;
  // By rank 0's clock; ZeroDuration: not by time.
  absl::Duration Interval() const;
  bool IsStepToSave() const;
  std::string Wanted();

  Engine* const engine_;
  const std::shared_ptr<Communicator> comm_;
  const CheckpointManagerOptions options_;
  std::unique_ptr<StopSignals> signals_;
  std::unique_ptr<RunFolder> folder_;  // both by Create
  std::unique_ptr<SaveRoom> room_;
  std::string good_;  // saved or loaded by this manager, so whole; "": none yet
  std::shared_ptr<LastSave> last_ = std::make_shared<LastSave>();
  int64_t seen_updates_ = -1;
  // Of what is in the folder; -1: not looked yet.
  int64_t newest_micros_ = -1;
  // Names that Resume has passed over, and why.
  std::map<std::string, absl::Status> passed_over_;
  absl::Duration last_save_;  // by the clock
  int64_t saves_ = 0;
  absl::Duration cost_;             // of all saves, to the training
  absl::Duration logged_interval_;  // in the last report
};

}  // namespace tessera
#endif  // ENGINE_CHECKPOINT_MANAGER_H_
