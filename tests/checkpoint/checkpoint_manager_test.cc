// When checkpoints are saved without being asked for one by one, which are
// kept, and from which a run goes on.
#include "engine/checkpoint_manager.h"

#include <signal.h>
#include <sys/resource.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
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
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// "<dir>\n<steps>": trains to that step, from where a run before has stopped.
struct ManagerArgs {
  explicit ManagerArgs(absl::string_view text) {
    const std::vector<std::string> lines = absl::StrSplit(text, '\n');
    options.dir = lines.at(0);
    TESSERA_CHECK(absl::SimpleAtoi(lines.at(1), &steps));
    options.keep_last = 2;
    options.every_steps = 2;
    options.keep_every = 4;
  }
  CheckpointManagerOptions options;
  int64_t steps = 0;
};

absl::StatusOr<Trainee> MakeTrainee(const World& world) {
  TrainingSpec spec;
  spec.stage = 2;
  return Trainee::Make(spec, world.communicator());
}

// "resumed from 4 'after 4', stopped at 7".
absl::StatusOr<std::string> Run(Trainee& trainee, CheckpointManager& manager,
                                const std::optional<std::string>& resumed,
                                int64_t steps, int64_t signal_at = -1) {
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
      raise(SIGUSR1);  // from the launcher, too
    }
    TESSERA_ASSIGN_OR_RETURN(stop, manager.MaybeSave(position));
  }
  if (!stop) TESSERA_RETURN_IF_ERROR(manager.Finish(position));
  absl::StrAppend(&report, stop ? ", told to stop at " : ", ended at ",
                  engine.step());
  return report;
}

TESSERA_RANK_FUNCTION(TrainManaged) {
  const ManagerArgs a(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  TESSERA_ASSIGN_OR_RETURN(
      const auto manager,
      CheckpointManager::Create(trainee.engine.get(), a.options));
  TESSERA_ASSIGN_OR_RETURN(const auto resumed, manager->Resume());
  return Run(trainee, *manager, resumed, a.steps);
}

class CheckpointManagerTest : public testing::Test {
 protected:
  std::vector<std::string> Train(int steps) {
    return RunOnRanks(2, "TrainManaged", absl::StrCat(dir_, "\n", steps));
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

TEST_F(CheckpointManagerTest, SavesAtMultiplesAndAtTheEndAndGoesOnFromThere) {
  EXPECT_THAT(Train(5), Each("began, ended at 5"));
  EXPECT_THAT(Steps(), ElementsAre(5, 4));
  EXPECT_EQ(Latest(), "step-00000005\n");
  EXPECT_THAT(Train(11), Each("resumed from 5 'after 5', ended at 11"));
  EXPECT_THAT(Steps(), ElementsAre(11, 10, 8, 4));
  EXPECT_EQ(Latest(), "step-00000011\n");
}

TEST_F(CheckpointManagerTest, OneThatIsDamagedIsPassedOverForTheOneBefore) {
  Train(6);
  ASSERT_THAT(Steps(), ElementsAre(6, 4));
  const std::string newest = dir_ + "/step-00000006";
  for (const auto& entry : fs::directory_iterator(newest)) {
    if (!absl::StrContains(entry.path().string(), ".rank-00001")) continue;
    // A byte of the data: it is seen only by who reads it.
    std::string bytes = ReadWholeFile(entry.path()).value();
    bytes[bytes.size() / 3] ^= 1;
    std::ofstream(entry.path(), std::ios::binary) << bytes;
  }
  EXPECT_THAT(Train(5), Each("resumed from 4 'after 4', ended at 5"));
  // It was saved last, and 6 is damaged.
  EXPECT_THAT(Train(6), Each("resumed from 5 'after 5', ended at 6"));
  // All of them: no silent start from nothing.
  const auto found = ListStepFolders(dir_, FileSystem::Real()).value();
  for (const StepFolder& one : found) {
    fs::resize_file(absl::StrCat(dir_, "/", one.name, "/manifest"), 20);
  }
  EXPECT_THAT(Train(7), Each(HasSubstr("manifest")));
}

TESSERA_RANK_FUNCTION(ResumeFromStep) {
  const ManagerArgs a(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  TESSERA_ASSIGN_OR_RETURN(
      const auto manager,
      CheckpointManager::Create(trainee.engine.get(), a.options));
  const absl::Status other = manager->Resume(3).status();
  TESSERA_ASSIGN_OR_RETURN(const auto resumed, manager->Resume(4));
  TESSERA_ASSIGN_OR_RETURN(std::string report,
                           Run(trainee, *manager, resumed, a.steps));
  return absl::StrCat(report, "; ", other.ToString());
}

// Back to an earlier one: what is saved then is the newest, whatever its step.
TEST_F(CheckpointManagerTest, GoesBackToAStep) {
  Train(8);
  ASSERT_THAT(Steps(), ElementsAre(8, 6, 4));
  EXPECT_THAT(RunOnRanks(2, "ResumeFromStep", absl::StrCat(dir_, "\n5")),
              Each(AllOf(HasSubstr("resumed from 4 'after 4', ended at 5"),
                         HasSubstr("no checkpoint of step 3"))));
  EXPECT_THAT(Steps(), ElementsAre(5, 8, 4));
  EXPECT_THAT(Train(6), Each("resumed from 5 'after 5', ended at 6"));
}

TESSERA_RANK_FUNCTION(TrainUntilToldToEnd) {
  ManagerArgs a(args);
  a.options.every_steps = 0;
  a.options.async = true;
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  {
    TESSERA_ASSIGN_OR_RETURN(
        const auto manager,
        CheckpointManager::Create(trainee.engine.get(), a.options));
    TESSERA_ASSIGN_OR_RETURN(
        const std::string report,
        Run(trainee, *manager, std::nullopt, a.steps, /*signal_at=*/3));
    if (report != "began, told to stop at 3") {
      return absl::InternalError(report);
    }
  }
  // The handler is gone with the manager.
  struct sigaction now;
  sigaction(SIGUSR1, nullptr, &now);
  return now.sa_handler == SIG_DFL ? "as before" : "still caught";
}

TEST_F(CheckpointManagerTest, ASignalOfOneRankSavesAndEndsAll) {
  EXPECT_THAT(RunOnRanks(2, "TrainUntilToldToEnd", absl::StrCat(dir_, "\n9")),
              Each("as before"));
  EXPECT_THAT(Steps(), ElementsAre(3));
  EXPECT_THAT(Train(4), Each("resumed from 3 'after 3', ended at 4"));
}

// Intervals of nothing and of ever.
TESSERA_RANK_FUNCTION(TrainByTheClock) {
  ManagerArgs a(args);
  a.options.every_steps = 0;
  a.options.keep_last = 100;
  a.options.on_signals = false;
  const bool often = a.steps == 4;
  a.options.every = often ? absl::Nanoseconds(1) : absl::Hours(1000);
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  TESSERA_ASSIGN_OR_RETURN(
      const auto manager,
      CheckpointManager::Create(trainee.engine.get(), a.options));
  return Run(trainee, *manager, std::nullopt, a.steps);
}

TEST_F(CheckpointManagerTest, SavesByTheClock) {
  RunOnRanks(2, "TrainByTheClock", absl::StrCat(dir_, "\n4"));
  EXPECT_THAT(Steps(), ElementsAre(4, 3, 2, 1));
  fs::remove_all(dir_);
  RunOnRanks(2, "TrainByTheClock", absl::StrCat(dir_, "\n3"));
  EXPECT_THAT(Steps(), ElementsAre(3));  // at the end
}

TESSERA_RANK_FUNCTION(ManagerOptionsDiffer) {
  ManagerArgs a(args);
  a.options.keep_last += world.rank();
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  return CheckpointManager::Create(trainee.engine.get(), a.options)
      .status()
      .ToString();
}

// A disk that was full when it was time, and is not at the end.
TESSERA_RANK_FUNCTION(SaveAgainAtTheEnd) {
  ManagerArgs a(args);
  a.options.async = true;
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  TESSERA_ASSIGN_OR_RETURN(
      const auto manager,
      CheckpointManager::Create(trainee.engine.get(), a.options));
  TESSERA_RETURN_IF_ERROR(trainee.TrainStep(0));
  {
    struct rlimit before;
    getrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, SIG_IGN);
    const rlimit full{100, before.rlim_max};
    if (trainee.rank == 1) setrlimit(RLIMIT_FSIZE, &full);
    TESSERA_RETURN_IF_ERROR(manager->Save());
    while (trainee.engine->saving_checkpoint()) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    setrlimit(RLIMIT_FSIZE, &before);
  }
  TESSERA_RETURN_IF_ERROR(manager->Finish());
  return "saved";
}

TEST_F(CheckpointManagerTest, WhatCouldNotBeSavedIsSavedAtTheEnd) {
  EXPECT_THAT(RunOnRanks(2, "SaveAgainAtTheEnd", absl::StrCat(dir_, "\n1")),
              Each("saved"));
  EXPECT_THAT(Steps(), ElementsAre(1));
}

TEST_F(CheckpointManagerTest, OptionsThatDifferAreRefused) {
  EXPECT_THAT(RunOnRanks(2, "ManagerOptionsDiffer", absl::StrCat(dir_, "\n1")),
              Each(AllOf(HasSubstr("CheckpointManagerOptions differs"),
                         HasSubstr("keep_last 3"))));
}

// Daly's figures for a mean of 24 hours and saves of 5 minutes.
TEST(OptimalSaveIntervalTest, IsYoungsWithDalysCorrection) {
  const absl::Duration young = absl::Seconds(std::sqrt(2 * 300.0 * 24 * 3600));
  const absl::Duration best =
      OptimalSaveInterval(absl::Minutes(5), absl::Hours(24));
  EXPECT_LT(best, young);
  EXPECT_GT(best, young - absl::Minutes(5));
  EXPECT_NEAR(absl::ToDoubleSeconds(best), 7001.3889, 0.0001);
  EXPECT_EQ(OptimalSaveInterval(absl::Hours(3), absl::Hours(1)),
            absl::Hours(1));
  EXPECT_EQ(OptimalSaveInterval(absl::ZeroDuration(), absl::Hours(1)),
            absl::ZeroDuration());
}

}  // namespace
}  // namespace tessera
