// Runs a training with a CheckpointManager, for its tests.
#ifndef TESTS_CHECKPOINT_CHECKPOINT_MANAGER_TEST_UTIL_H_
#define TESTS_CHECKPOINT_CHECKPOINT_MANAGER_TEST_UTIL_H_

#include <signal.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/file.h"
#include "base/status.h"
#include "checkpoint/format/step_folders.h"
#include "comm/world/world.h"
#include "engine/checkpoint_manager.h"
#include "engine/engine.h"
#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {

// Parses "<dir>\n<steps>", and "\nfew": only the last two checkpoints are kept.
// Training goes to that step, from where a previous run has stopped.
struct ManagerArgs {
  explicit ManagerArgs(absl::string_view text) {
    const std::vector<std::string> lines = absl::StrSplit(text, '\n');
    options.dir = lines.at(0);
    TESSERA_CHECK(absl::SimpleAtoi(lines.at(1), &steps));
    options.keep_last = 2;
    options.every_steps = 2;
    options.keep_every = lines.size() > 2 ? 0 : 4;
  }
  CheckpointManagerOptions options;
  int64_t steps = 0;
};

inline absl::StatusOr<Trainee> MakeTrainee(const World& world) {
  TrainingSpec spec;
  spec.stage = 2;
  return Trainee::Make(spec, world.communicator());
}

// Runs `save`, which begins while the disk of rank 1 is full, and waits for its
// end.
inline absl::Status WithFullDisk(Trainee& trainee,
                                 const std::function<absl::Status()>& save) {
  struct rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, SIG_IGN);
  const rlimit full{100, before.rlim_max};
  if (trainee.rank == 1) setrlimit(RLIMIT_FSIZE, &full);
  const absl::Status begun = save();
  while (trainee.engine->saving_checkpoint()) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  setrlimit(RLIMIT_FSIZE, &before);
  return begun;
}

// Returns "resumed from 4 'after 4', stopped at 7".
inline absl::StatusOr<std::string> Run(
    Trainee& trainee, CheckpointManager& manager,
    const std::optional<std::string>& resumed, int64_t steps,
    int64_t signal_at = -1) {
  Engine& engine = *trainee.engine;
  std::string report =
      resumed.has_value()
          ? absl::StrCat("resumed from ", engine.step(), " '", *resumed, "'")
          : std::string("began");
  const auto position = [&] { return absl::StrCat("after ", engine.step()); };
  bool stop = false;
  while (engine.step() < steps && !stop) {
    TESSERA_RETURN_IF_ERROR(trainee.TrainStep(engine.step()));
    if (engine.step() == signal_at && trainee.rank == 1) {
      raise(SIGUSR1);
      raise(SIGUSR1);  // as the launcher may, too
    }
    TESSERA_ASSIGN_OR_RETURN(stop, manager.MaybeSave(position));
  }
  if (!stop) TESSERA_RETURN_IF_ERROR(manager.Finish(position));
  absl::StrAppend(&report, stop ? ", told to stop at " : ", ended at ",
                  engine.step());
  return report;
}

class CheckpointManagerTest : public testing::Test {
 protected:
  std::vector<std::string> Train(int steps, const char* more = "") {
    return RunOnRanks(2, "TrainManaged", absl::StrCat(dir_, "\n", steps, more));
  }
  std::string PathOf(int64_t step) {
    return absl::StrCat(dir_, "/", StepFolderName(step));
  }
  // Flips a byte of the data, which only a reader of the data notices.
  void FlipAByteOf(int64_t step) {
    for (const auto& entry :
         std::filesystem::directory_iterator(PathOf(step))) {
      if (!absl::StrContains(entry.path().string(), ".rank-00001")) continue;
      std::string bytes = ReadWholeFile(entry.path()).value();
      bytes[bytes.size() / 3] ^= 1;
      std::ofstream(entry.path(), std::ios::binary) << bytes;
    }
  }
  std::vector<int64_t> Steps() {
    std::vector<int64_t> steps;
    const auto found = ListStepFolders(dir_, FileSystem::Real()).value();
    for (const StepFolder& one : found) {
      steps.push_back(one.step);
    }
    return steps;
  }
  std::string Latest() { return ReadWholeFile(dir_ + "/latest").value(); }

  const TempFolder folder_;
  const std::string dir_ = folder_ / "run";
};

}  // namespace tessera
#endif  // TESTS_CHECKPOINT_CHECKPOINT_MANAGER_TEST_UTIL_H_
