// Checkpoints of two ranks: a resumed run is the one that did not stop, to the
// bit; a save that fails leaves what was there.
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "tests/checkpoint/checkpoint_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

std::string ClientState(int rank) {
  return absl::StrCat("position ", rank, std::string("\0\n", 2), "end");
}

absl::Status SaveCheckpoint(Engine& engine, const std::string& dir, int rank) {
  return engine.SaveCheckpoint(dir, ClientState(rank));
}

// ---- resuming

TESSERA_RANK_FUNCTION(TrainAndSave) {
  const CheckpointArgs a(args);
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), 0, &record));
  TESSERA_RETURN_IF_ERROR(SaveCheckpoint(*engine, a.dir, world.rank()));
  TESSERA_RETURN_IF_ERROR(AddFinalState(*engine, *model, &record));
  return ToText(record);
}

// Starts from other values and another generator than those that were saved.
TESSERA_RANK_FUNCTION(LoadAndTrain) {
  const CheckpointArgs a(args);
  at::set_num_threads(1);
  torch::manual_seed(99);
  auto model = MakeTestModel(a.spec.model);
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  TESSERA_ASSIGN_OR_RETURN(const LoadCheckpointReport report,
                           engine->LoadCheckpoint(a.dir));
  const std::string& client = report.client_state;
  if (client != ClientState(world.rank())) {
    return absl::InternalError(absl::StrCat("client state '", client, "'"));
  }
  Record record;
  TESSERA_RETURN_IF_ERROR(TrainSteps(*engine, *model, a.spec, world.rank(),
                                     static_cast<int>(engine->step()),
                                     &record));
  TESSERA_RETURN_IF_ERROR(AddFinalState(*engine, *model, &record));
  return ToText(record);
}

TEST_P(CheckpointTest, AResumedRunIsTheOneThatDidNotStop) {
  for (int accumulation : {1, 2}) {
    SCOPED_TRACE(accumulation);
    spec_.accumulation = accumulation;
    ExpectOracle(Run("TrainAndSave", 2), spec_, 2, 0);
    ExpectOracle(Run("LoadAndTrain", 4), spec_, 4, 2);
  }
}

// Step counts of their own, and a parameter that was never stepped; parameters
// that never are, integers too.
TEST_P(CheckpointTest, AResumedRunKeepsWhichParametersWereSkipped) {
  for (const char* model : {"ChangingRank", "NeverTrained"}) {
    spec_.model = model;
    ExpectOracle(Run("TrainAndSave", 2), spec_, 2, 0);
    ExpectOracle(Run("LoadAndTrain", 6), spec_, 6, 2);
  }
}

// ---- saving

TEST_P(CheckpointTest, SavingOverACheckpointReplacesItWhole) {
  Run("TrainAndSave", 1);
  // This file is left by a save that did not end.
  std::ofstream(dir_ + "/0123456789abcdef.rank-00007") << "half a checkpoint";
  Run("TrainAndSave", 2);
  ExpectOracle(Run("LoadAndTrain", 4), spec_, 4, 2);
  EXPECT_THAT(Names(), UnorderedElementsAre("manifest", "lock", DataFile(0),
                                            DataFile(1)));
}

// Saves after one step; then rank 1 cannot.
TESSERA_RANK_FUNCTION(SaveFailsOnRank1) {
  CheckpointArgs a(args);
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  Record record;
  a.spec.steps = 2;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), 0, &record));
  TESSERA_RETURN_IF_ERROR(SaveCheckpoint(*engine, a.dir, world.rank()));
  a.spec.steps = 3;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), 2, &record));
  absl::Status status;
  if (world.rank() == 1) {
    FullDisk full(1000);
    status = SaveCheckpoint(*engine, a.dir, world.rank());
  } else {
    status = SaveCheckpoint(*engine, a.dir, world.rank());
  }
  return status.ToString();
}

TEST_P(CheckpointTest, ASaveThatFailsOnOneRankLeavesTheOldCheckpoint) {
  EXPECT_THAT(Run("SaveFailsOnRank1", 3),
              Each(AllOf(HasSubstr("rank 1"), HasSubstr("rank-00001"),
                         HasSubstr("File too large"))));
  EXPECT_THAT(Names(), UnorderedElementsAre("manifest", "lock", DataFile(0),
                                            DataFile(1)));
  ExpectOracle(Run("LoadAndTrain", 4), spec_, 4, 2);
}

TEST_P(CheckpointTest, AFolderThatCannotBeMadeIsNamed) {
  std::ofstream(folder_ / "file") << "not a folder";
  dir_ = folder_ / "file/ckpt";
  EXPECT_THAT(Run("TrainAndSave", 1), Each(HasSubstr(dir_)));
  dir_ = folder_ / "file";
  EXPECT_THAT(Run("TrainAndSave", 1),
              Each(AllOf(HasSubstr("is not a folder"), HasSubstr(dir_))));
  EXPECT_EQ(ReadWholeFile(folder_ / "file").value(), "not a folder");
}

TESSERA_RANK_FUNCTION(SaveInTheMiddleOfAStep) {
  CheckpointArgs a(args);
  a.spec.accumulation = 2;
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(engine->Backward(model->Loss(world.rank(), 0)));
  const absl::Status after_backward = engine->SaveCheckpoint(a.dir);
  TESSERA_RETURN_IF_ERROR(engine->Step());
  const absl::Status after_step = engine->SaveCheckpoint(a.dir);
  return absl::StrCat(after_backward.ToString(), "\n", after_step.ToString());
}

TEST_P(CheckpointTest, SavingInTheMiddleOfAStepIsRefused) {
  const std::string refused =
      "FAILED_PRECONDITION: [SaveCheckpoint] rank 0: in the middle of a step";
  EXPECT_THAT(
      Run("SaveInTheMiddleOfAStep", 1),
      Each(AllOf(HasSubstr(refused), HasSubstr(absl::StrCat("\n", refused)))));
  EXPECT_FALSE(fs::exists(dir_));
}

INSTANTIATE_TEST_SUITE_P(All, CheckpointTest, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

// All stages at once, since new processes cost half a second.
class NewProcessesTest : public CheckpointTest {};

TEST_P(NewProcessesTest, ResumeToTheSameBits) {
  const std::string parent = dir_;
  for (int stage = 0; stage < 4; ++stage) {
    spec_.stage = stage;
    dir_ = absl::StrCat(parent, stage);
    ExpectOracle(Run("TrainAndSave", 2), spec_, 2, 0);
  }
  RankPool::EndAll();
  for (int stage = 0; stage < 4; ++stage) {
    spec_.stage = stage;
    dir_ = absl::StrCat(parent, stage);
    ExpectOracle(Run("LoadAndTrain", 4), spec_, 4, 2);
  }
}

INSTANTIATE_TEST_SUITE_P(AllStages, NewProcessesTest, ::testing::Values(0),
                         [](const auto&) { return "AtOnce"; });

}  // namespace
}  // namespace tessera
