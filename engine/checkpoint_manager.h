// CheckpointManager: decides when to save, under which name, and what to keep,
// in one line of a training loop.
//
//   CheckpointManagerOptions options;  // or "checkpoint" in the configuration
//   options.dir = "run7";
//   options.every = absl::Minutes(10);
//   auto manager = *CheckpointManager::Create(engine.get(), options);
//   auto saved = *manager->Resume();             // nullopt: from the start
//   while (engine->step() < steps) {
//     ... forward, Backward, Step ...
//     if (evaluates) {  // true: the metric has stopped improving
//       if (*manager->ReportMetric(loss.value(), position)) break;
//     }
//     // True: a signal says that the program should end.
//     if (*manager->MaybeSave([&] { return Position(); })) break;
//   }
//   manager->Finish([&] { return Position(); });
//
// The folder belongs to one job: from Create on it is locked (DIR/job.lock),
// until the manager or its process ends. Another job's Create returns
// Unavailable at once and names its process and host.
//
// Each checkpoint has a folder, `dir`/step-00000120; `dir`/latest names the
// newest (checkpoint/format/step_folders.h). DeepSpeed: save_checkpoint's tags
// and `latest`; Orbax: CheckpointManager. Several managers of one engine
// (tiers), and the program's own saves, do not see each other's errors.
//
// Threads: all calls come from the thread of the engine's calls.
#ifndef ENGINE_CHECKPOINT_MANAGER_H_
#define ENGINE_CHECKPOINT_MANAGER_H_

#include <atomic>
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
class BestMetric;        // engine/run/best_metric.h
struct RunFolder;        // engine/run/run_folder.h
class SaveRoom;          // engine/run/save_room.h
class StopSignals;       // engine/run/stop_signals.h

// When to save and what to keep; identical on all ranks. The first condition
// that holds triggers a save. What is unset is as the section `checkpoint` of
// the engine's configuration says, by the key in brackets, and otherwise the
// default.
struct CheckpointManagerOptions {
  // The folder [folder]; one of the two names it. A relative path is resolved
  // at Create, whatever the working directory is later.
  std::string dir;
  // Saves at steps that are multiples of this [every_steps]; 0, the default:
  // no.
  std::optional<int64_t> every_steps;
  // Saves when so much time has passed since the last save, by rank 0's clock
  // [every_minutes]; 0, the default: no.
  std::optional<absl::Duration> every;
  // Mean time between failures of the job, all hosts together
  // [minutes_between_failures]. The interval is then Young's and Daly's (J. W.
  // Young, 1974; J. T. Daly, 2006), from this and what saves cost the training
  // so far; the first is after the first step. 0, the default: no.
  std::optional<absl::Duration> mean_time_between_failures;
  // Saves on SIGTERM or SIGUSR1 to any rank's process [on_signals]; true by
  // default.
  std::optional<bool> on_signals;
  // Number of latest checkpoints to keep [keep_last]; at least 1, 2 by default.
  std::optional<int> keep_last;
  // Checkpoints of steps that are multiples of this are never removed, and do
  // not count for keep_last [keep_every]; 0, the default: none.
  std::optional<int64_t> keep_every;
  // For ReportMetric. Whether a larger metric is better than a smaller one
  // [larger_is_better]; false by default. And how much better than the best it
  // has to be, or it counts as no better [min_delta]; 0 by default.
  std::optional<bool> larger_is_better;
  std::optional<double> min_delta;
  // ReportMetric returns true after this many reports in a row without
  // progress [patience]; 0, the default: never.
  std::optional<int64_t> patience;
  // Saves at a report of the best metric, and keeps that checkpoint until a
  // better one is saved, besides those of keep_last; DIR/best names it
  // [keep_best]. False by default.
  std::optional<bool> keep_best;
  std::optional<bool> async;       // as SaveOptions::async
  std::optional<bool> node_local;  // as SaveOptions::node_local
  // How long a save that finds the disk full is retried, with growing pauses of
  // up to 30 s [retry_minutes]: older checkpoints are removed to make room, but
  // never the newest whole one, nor those of keep_every. An async save is
  // retried while training goes on, where `every` or `on_signals` makes ranks
  // agree at each step. 5 minutes by default; 0: no retries.
  std::optional<absl::Duration> retry_for;
  // How long Create waits where another job still has the folder, such as a
  // previous one that is ending; 0: an error at once.
  absl::Duration wait_for_folder = absl::ZeroDuration();
  Clock clock = MonotonicNow;  // of `every`, and of what saves cost
};

// Returns Daly's interval between checkpoints that cost `save` each: his
// formula of higher order, or `mean_time_between_failures` where a save takes
// twice that or longer.
absl::Duration OptimalSaveInterval(absl::Duration save,
                                   absl::Duration mean_time_between_failures);

class CheckpointManager {
 public:
  // Returns this rank's own bytes, which Resume gives back. Called only when a
  // checkpoint is saved.
  using ClientState = std::function<std::string()>;

  // Makes and locks the folder. `engine` outlives this. Without options all is
  // as the engine's configuration says. COLLECTIVE. InvalidArgument: no folder,
  // keep_last below 1, options that differ between
  // ranks; Unavailable: another job has the folder. If the folder or a file in
  // it cannot be made, the error is the system's (PermissionDenied, NotFound);
  // but a folder with checkpoints may be read-only, with a warning, if options
  // do not say when to save (every_steps, every, mean_time_between_failures,
  // keep_best). A file system without locks is a warning, too.
  static absl::StatusOr<std::unique_ptr<CheckpointManager>> Create(
      Engine* engine, CheckpointManagerOptions options = {});
  // Waits for a save that is being written.
  ~CheckpointManager();

  // Loads the checkpoint that was saved last, or the one of `step`; nullopt if
  // there is none yet. A damaged one is skipped, with an error in the log, and
  // the one before it is loaded. NotFound: none of `step`; other errors as
  // Engine::LoadCheckpoint's. COLLECTIVE.
  absl::StatusOr<std::optional<std::string>> Resume(
      std::optional<int64_t> step = std::nullopt);

  // Saves if it is time to; call it after each Step. Returns true if the
  // program should end because of a signal: the state is saved then, and on the
  // disk, and rank 0 logs the signal, the step and the folder. Errors are
  // Engine::SaveCheckpoint's, identical on all ranks, except that of an earlier
  // async save, which goes to the log; and what `client_state` throws.
  // COLLECTIVE.
  absl::StatusOr<bool> MaybeSave(const ClientState& client_state = nullptr);
  // Takes a metric of this step, such as a validation loss (early stopping).
  // Call it before the step's MaybeSave, since checkpoints hold what was
  // reported before them; Resume continues from there. Returns true if the
  // program should end, because of options' patience. NaN is no better than
  // anything. The metric is identical on all ranks (checked: InvalidArgument);
  // other errors are Save's. COLLECTIVE.
  absl::StatusOr<bool> ReportMetric(double metric,
                                    const ClientState& client_state = nullptr);
  // Returns the step of the best metric so far, for Resume(*best_step()) where
  // keep_best is set, and that metric; nullopt before a report. After Resume
  // with keep_best it is the best one whose checkpoint is there. LOCAL.
  std::optional<int64_t> best_step() const;
  std::optional<double> best_metric() const;
  // Saves now, unless this step is saved already. COLLECTIVE.
  absl::Status Save(const ClientState& client_state = nullptr);
  // Ends the run: as Save, and waits until it is on the disk. A failed save of
  // this step is made again. Report goes to the log. COLLECTIVE.
  absl::Status Finish(const ClientState& client_state = nullptr);

  // Summarizes the saves: "3 saves, blocking training for 800ms each; one every
  // 12m5s". LOCAL.
  std::string Report() const;

 private:
  CheckpointManager(Engine* engine, std::shared_ptr<Communicator> comm,
                    CheckpointManagerOptions options);
  // How the last save of this manager ended. It may end after the manager has
  // been destroyed.
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
  absl::Status WriteBestOf(const std::string& name);
  void ForgetBestBefore();
  std::string StateOfBest() const;
  // Continues from what StateOfBest returned when the loaded checkpoint was
  // saved; `folders` are those of all steps.
  absl::Status ResumeBest(const std::string& state,
                          const std::vector<std::string>& folders);
  void NoteCost(absl::Duration cost);
  void LogReport();
  // Returns the folders of all steps, the newest first.
  absl::StatusOr<std::vector<std::string>> Candidates();
  FolderHolds Holds() const;
  // The time between saves, by rank 0's clock; ZeroDuration: not by time.
  absl::Duration Interval() const;
  bool IsStepToSave() const;
  std::string Wanted();

  Engine* const engine_;
  const std::shared_ptr<Communicator> comm_;
  // Nothing is unset but async and node_local.
  const CheckpointManagerOptions options_;
  std::unique_ptr<StopSignals> signals_;
  std::unique_ptr<RunFolder> folder_;  // both by Create
  std::unique_ptr<SaveRoom> room_;
  std::string good_;  // saved or loaded by this manager, so whole; "": none yet
  std::unique_ptr<BestMetric> best_;
  // With keep_best: the checkpoint of the best metric, and the previous one
  // until that is on the disk; "": none.
  std::string best_name_, best_before_;
  std::string before_state_;  // best_'s, of best_before_
  std::shared_ptr<LastSave> last_ = std::make_shared<LastSave>();
  int64_t seen_updates_ = -1;
  // Time of the newest checkpoint in the folder; -1: not looked up yet.
  int64_t newest_micros_ = -1;
  // Whether the log has said which checkpoints are kept; shared with saves.
  const std::shared_ptr<std::atomic<bool>> told_removal_ =
      std::make_shared<std::atomic<bool>>(false);
  // Names of checkpoints that Resume has skipped, and why.
  std::map<std::string, absl::Status> passed_over_;
  absl::Duration last_save_;  // by the clock
  int64_t saves_ = 0;
  absl::Duration cost_;             // of all saves, to the training
  absl::Duration logged_interval_;  // in the last report
};

}  // namespace tessera
#endif  // ENGINE_CHECKPOINT_MANAGER_H_
