// Managers whose saves fail, and others' beside them.
#include <signal.h>
#include <sys/resource.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/checkpoint_manager.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/checkpoint/checkpoint_manager_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// `save` begins where the disk of rank 1 is full, and has ended.
absl::Status WithFullDisk(Trainee& trainee,
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

// A disk that was full when it was time, and is not at the end.
TESSERA_RANK_FUNCTION(SaveAgainAtTheEnd) {
  ManagerArgs a(args);
  a.options.async = true;
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  TESSERA_ASSIGN_OR_RETURN(
      const auto manager,
      CheckpointManager::Create(trainee.engine.get(), a.options));
  TESSERA_RETURN_IF_ERROR(trainee.TrainStep(0));
  TESSERA_RETURN_IF_ERROR(
      WithFullDisk(trainee, [&] { return manager->Save(); }));
  if (a.steps == 2 && trainee.engine->WaitForCheckpoint().ok()) {
    return "WaitForCheckpoint did not tell";
  }
  TESSERA_RETURN_IF_ERROR(manager->Finish());
  return "saved";
}

TEST_F(CheckpointManagerTest, WhatCouldNotBeSavedIsSavedAtTheEnd) {
  EXPECT_THAT(RunOnRanks(2, "SaveAgainAtTheEnd", absl::StrCat(dir_, "\n1")),
              Each("saved"));
  EXPECT_THAT(Steps(), ElementsAre(1));
  fs::remove_all(dir_);
  // Also where the program has been told before.
  EXPECT_THAT(RunOnRanks(2, "SaveAgainAtTheEnd", absl::StrCat(dir_, "\n2")),
              Each("saved"));
  EXPECT_THAT(Steps(), ElementsAre(1));
}

// Two tiers, `dir` and `dir`2, and a save of the program's own.
TESSERA_RANK_FUNCTION(TwoManagers) {
  ManagerArgs a(args);
  a.options.async = true;
  a.options.on_signals = false;
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  Engine& engine = *trainee.engine;
  TESSERA_ASSIGN_OR_RETURN(const auto first,
                           CheckpointManager::Create(&engine, a.options));
  a.options.dir += "2";
  TESSERA_ASSIGN_OR_RETURN(const auto second,
                           CheckpointManager::Create(&engine, a.options));
  int called = 0;
  const auto position = [&] { return absl::StrCat(++called); };
  // One that fails is saved again, whoever saves meanwhile.
  TESSERA_RETURN_IF_ERROR(trainee.TrainStep(0));
  TESSERA_RETURN_IF_ERROR(
      WithFullDisk(trainee, [&] { return first->Save(position); }));
  TESSERA_RETURN_IF_ERROR(second->Save());
  TESSERA_RETURN_IF_ERROR(first->Finish(position));
  if (called != 2) return absl::StrCat("saved ", called, " times");
  // One that is good is not.
  TESSERA_RETURN_IF_ERROR(
      WithFullDisk(trainee, [&] { return second->Save(); }));
  TESSERA_RETURN_IF_ERROR(trainee.TrainStep(1));
  TESSERA_RETURN_IF_ERROR(first->Save(position));
  engine.SettleCheckpoint();  // the disk is full for the second's alone
  TESSERA_RETURN_IF_ERROR(
      WithFullDisk(trainee, [&] { return second->Save(); }));
  TESSERA_RETURN_IF_ERROR(first->Finish(position));
  if (called != 3) return absl::StrCat("saved ", called, " times then");
  // The program is told of its own.
  SaveOptions own;
  own.async = true;
  TESSERA_RETURN_IF_ERROR(WithFullDisk(trainee, [&] {
    return engine.SaveCheckpoint(absl::StrCat(a.options.dir, "/own"), "", own);
  }));
  TESSERA_RETURN_IF_ERROR(trainee.TrainStep(2));
  TESSERA_RETURN_IF_ERROR(first->Finish(position));
  TESSERA_RETURN_IF_ERROR(second->Finish());
  return engine.WaitForCheckpoint().ToString();
}

TEST_F(CheckpointManagerTest, ManagersOfOneEngineDoNotTakeEachOthersErrors) {
  EXPECT_THAT(RunOnRanks(2, "TwoManagers", absl::StrCat(dir_, "\n0")),
              Each(AllOf(HasSubstr("2/own"), HasSubstr("File too large"))));
  EXPECT_THAT(Steps(), ElementsAre(3, 2));
}

TESSERA_RANK_FUNCTION(PositionThrowsOnOneRank) {
  ManagerArgs a(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  TESSERA_ASSIGN_OR_RETURN(
      const auto manager,
      CheckpointManager::Create(trainee.engine.get(), a.options));
  TESSERA_RETURN_IF_ERROR(trainee.TrainStep(0));
  const absl::Status thrown = manager->Save([&]() -> std::string {
    if (trainee.rank == 1) throw std::runtime_error("no position");
    return "";
  });
  TESSERA_RETURN_IF_ERROR(manager->Finish());
  return thrown.ToString();
}

TEST_F(CheckpointManagerTest, WhatOneRankThrowsIsAllRanksError) {
  EXPECT_THAT(
      RunOnRanks(2, "PositionThrowsOnOneRank", absl::StrCat(dir_, "\n1")),
      Each(AllOf(HasSubstr("rank 1"), HasSubstr("no position"))));
  EXPECT_THAT(Steps(), ElementsAre(1));
}

}  // namespace
}  // namespace tessera
