// Saves are written while training goes on: a save holds the state at the call,
// to the bit, and a later call reports its errors.
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "comm/fake_communicator_test_util.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "tests/checkpoint/checkpoint_state.h"
#include "tests/checkpoint/checkpoint_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

class CheckpointAsyncTest : public CheckpointTest {};

absl::StatusOr<std::unique_ptr<Engine>> SlowlySavingEngine(
    const CheckpointArgs& a, const std::shared_ptr<TestModel>& model,
    const std::shared_ptr<Communicator>& comm, int64_t bandwidth) {
  proto::Config config = ConfigOf(a.spec);
  config.mutable_checkpoint()->set_async(true);
  config.mutable_checkpoint()->set_max_bandwidth(bandwidth);
  EngineOptions options;
  options.communicator = comm;
  return Engine::Create(model, config, options);
}
absl::StatusOr<std::unique_ptr<Engine>> SlowlySavingEngine(
    const CheckpointArgs& a, const std::shared_ptr<TestModel>& model,
    const World& world, int64_t bandwidth) {
  return SlowlySavingEngine(a, model, world.communicator(), bandwidth);
}

// Two steps, a save that takes its time, and two steps while it is written; the
// program changes a parameter, too.
TESSERA_RANK_FUNCTION(TrainSaveAndTrainOn) {
  CheckpointArgs a(args);
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           SlowlySavingEngine(a, model, world, 100'000));
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), 0, &record));
  const int saved = a.spec.steps;
  TESSERA_RETURN_IF_ERROR(
      engine->SaveCheckpoint(a.dir, absl::StrCat("of ", world.rank())));
  const bool goes_on = engine->saving_checkpoint();
  a.spec.steps = saved + 2;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), saved, &record));
  {
    torch::NoGradGuard no_grad;
    for (const at::Tensor& p : model->parameters()) p.mul_(2);
  }
  TESSERA_RETURN_IF_ERROR(engine->WaitForCheckpoint());
  if (!goes_on || engine->saving_checkpoint()) {
    return absl::InternalError("the save did not go on beside the training");
  }
  return ToText(record);
}

TESSERA_RANK_FUNCTION(LoadWhatWasSavedAside) {
  const CheckpointArgs a(args);
  at::set_num_threads(1);
  torch::manual_seed(99);
  auto model = MakeTestModel(a.spec.model);
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  TESSERA_ASSIGN_OR_RETURN(const LoadCheckpointReport report,
                           engine->LoadCheckpoint(a.dir));
  const std::string& client = report.client_state;
  if (client != absl::StrCat("of ", world.rank())) {
    return absl::InternalError(absl::StrCat("client state '", client, "'"));
  }
  Record record;
  TESSERA_RETURN_IF_ERROR(TrainSteps(*engine, *model, a.spec, world.rank(),
                                     static_cast<int>(engine->step()),
                                     &record));
  TESSERA_RETURN_IF_ERROR(AddFinalState(*engine, *model, &record));
  return ToText(record);
}

TEST_P(CheckpointAsyncTest, HoldsTheStateOfTheCall) {
  for (const char* model : {"Attention", "ConvNorm"}) {
    spec_.model = model;
    for (const std::string& answer : Run("TrainSaveAndTrainOn", 2)) {
      EXPECT_THAT(answer, ::testing::StartsWith("step 0"));
    }
    ExpectOracle(Run("LoadWhatWasSavedAside", 4), spec_, 4, 2);
  }
}

// After SaveCheckpoint has returned, a save does not use the training's
// communicator, and writes no more in a second than it may.
TESSERA_RANK_FUNCTION(SaveAsideAndCount) {
  const CheckpointArgs a(args);
  constexpr int64_t kBandwidth = 300'000;
  auto model = BuildModel(a.spec.model, world.rank());
  auto comm = std::make_shared<FakeCommunicator>(world.communicator());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           SlowlySavingEngine(a, model, comm, kBandwidth));
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), 0, &record));
  const absl::Duration begin = MonotonicNow();
  TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(a.dir));
  const size_t before = comm->Take().size();
  const bool goes_on = engine->saving_checkpoint();
  TESSERA_RETURN_IF_ERROR(engine->WaitForCheckpoint());
  const absl::Duration took = MonotonicNow() - begin;
  const size_t beside = comm->Take().size();
  TESSERA_ASSIGN_OR_RETURN(const CheckpointReader saved,
                           CheckpointReader::Open(a.dir, FileSystem::Real()));
  // The bytes before the index are data, except for some alignment.
  const int64_t written =
      saved.manifest().files(world.rank()).index_offset() * 9 / 10;
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return absl::StrCat(
      before > 0 && goes_on ? "" : "not beside; ", beside, " collectives; ",
      took * kBandwidth >= absl::Seconds(written)
          ? "within its bandwidth"
          : absl::StrCat(written, " bytes in ", absl::FormatDuration(took)));
}

TEST_P(CheckpointAsyncTest, TakesNoCollectiveAndNoMoreThanItsBandwidth) {
  EXPECT_THAT(Run("SaveAsideAndCount", 2),
              Each("0 collectives; within its bandwidth"));
}

// A save does not include what the program writes into optimizer states
// meanwhile.
TESSERA_RANK_FUNCTION(TrainSaveAndSetStates) {
  CheckpointArgs a(args);
  auto model = BuildModel(a.spec.model, world.rank());
  std::string saved;
  {
    TESSERA_ASSIGN_OR_RETURN(auto engine,
                             SlowlySavingEngine(a, model, world, 100'000));
    Record record;
    TESSERA_RETURN_IF_ERROR(
        TrainSteps(*engine, *model, a.spec, world.rank(), 0, &record));
    TESSERA_ASSIGN_OR_RETURN(saved, StateOf(*engine, *model));
    TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(a.dir));
    for (const auto& item : model->named_parameters()) {
      TESSERA_ASSIGN_OR_RETURN(const at::Tensor master,
                               engine->Master(item.key()));
      TESSERA_RETURN_IF_ERROR(engine->SetOptimizerState(
          item.key(), "exp_avg_sq", torch::ones_like(master)));
    }
    TESSERA_RETURN_IF_ERROR(engine->WaitForCheckpoint());
    TESSERA_RETURN_IF_ERROR(engine->Close());
  }
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(engine->LoadCheckpoint(a.dir).status());
  TESSERA_ASSIGN_OR_RETURN(const std::string loaded, StateOf(*engine, *model));
  return loaded == saved ? "as saved" : absl::StrCat(saved, "\n--\n", loaded);
}

TEST_P(CheckpointAsyncTest, StatesThatAreSetMeanwhileAreNotSaved) {
  EXPECT_THAT(Run("TrainSaveAndSetStates", 2), Each("as saved"));
}

// Saves after one step; then rank 1 cannot, and all ranks are told later.
TESSERA_RANK_FUNCTION(AsyncSaveFailsOnRank1) {
  CheckpointArgs a(args);
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine, SlowlySavingEngine(a, model, world, 0));
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), 0, &record));
  const std::string client = absl::StrCat("of ", world.rank());
  TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(a.dir, client));
  TESSERA_RETURN_IF_ERROR(engine->WaitForCheckpoint());
  const int saved = a.spec.steps;
  std::string told;
  {
    const FullDisk full(world.rank() == 1 ? 1000 : RLIM_INFINITY);
    TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(a.dir, "lost"));
    a.spec.steps = saved + 1;
    TESSERA_RETURN_IF_ERROR(
        TrainSteps(*engine, *model, a.spec, world.rank(), saved, &record));
    // The error is returned instead of beginning another save.
    told = engine->SaveCheckpoint(a.dir, "not begun").ToString();
  }
  TESSERA_RETURN_IF_ERROR(engine->WaitForCheckpoint());
  return told;
}

TEST_P(CheckpointAsyncTest, AnErrorIsToldAtTheNextCallAndTheOldOneStays) {
  EXPECT_THAT(
      Run("AsyncSaveFailsOnRank1", 2),
      Each(AllOf(HasSubstr("the checkpoint of step 2 in"),
                 HasSubstr("rank-00001"), HasSubstr("File too large"))));
  EXPECT_THAT(Names(), UnorderedElementsAre("manifest", "lock", DataFile(0),
                                            DataFile(1)));
  ExpectOracle(Run("LoadWhatWasSavedAside", 4), spec_, 4, 2);
}

// The engine is destroyed while it saves: the save is finished.
TESSERA_RANK_FUNCTION(SaveAndLeave) {
  const CheckpointArgs a(args);
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           SlowlySavingEngine(a, model, world, 300'000));
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), 0, &record));
  TESSERA_RETURN_IF_ERROR(
      engine->SaveCheckpoint(a.dir, absl::StrCat("of ", world.rank())));
  if (a.spec.stage % 2 == 1) TESSERA_RETURN_IF_ERROR(engine->Close());
  return "left";
}

TEST_P(CheckpointAsyncTest, AnEngineThatEndsFinishesItsSave) {
  EXPECT_THAT(Run("SaveAndLeave", 2), Each("left"));
  ExpectOracle(Run("LoadWhatWasSavedAside", 4), spec_, 4, 2);
}

INSTANTIATE_TEST_SUITE_P(All, CheckpointAsyncTest,
                         ::testing::Values(0, 1, 2, 3), [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

}  // namespace
}  // namespace tessera
