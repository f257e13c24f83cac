// Tests Engine::Offload and Reload: while states are elsewhere, training goes
// on with the same bits.
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// States leave after the first step and come back after the third.
TEST(MovedStates, TrainWithTheOraclesBits) {
  for (const char* device : {"1", "1/workers", ""}) {  // a device comes first
    for (const int stage : {0, 1, 2, 3}) {
      for (const char* dtype : {"fp32", "bf16"}) {
        for (const bool own : {false, true}) {
          // A quarter of them, in which every pair occurs, and what is special.
          const bool narrow = *dtype == 'b';
          const int length = static_cast<int>(strlen(device));
          const bool is_one = narrow == ((length + stage) % 2 != 0) &&
                              own == ((length + stage / 2) % 2 != 0);
          const bool is_special = narrow || (own && length == 1);
          if (!is_one && !(is_special && stage == 3)) continue;
          TrainingSpec spec;
          spec.model = "Gpt";
          spec.steps = 4;
          spec.stage = stage;
          spec.dtype = dtype;
          spec.device = device;
          spec.moved = spec.device.empty() ? "nvme" : "cpu";
          spec.clipping = 0.5;
          if (own) spec.served = spec.shared = "off";
          // States that the configuration puts elsewhere stay there.
          if (own && stage == 3 && spec.dtype == "bf16") {
            spec.tier = spec.moved;
            spec.states_on_disk = 0.5;
          }
          ExpectEqualsOracle(spec, 2);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Both halves of masters leave, or remainders alone.
TEST(MovedStates, AreRemaindersOfMasters) {
  for (const char* device : {"1", ""}) {
    for (const int stage : {1, 3}) {
      for (const bool exact : {false, true}) {
        TrainingSpec spec;
        spec.model = "Gpt";
        spec.steps = 4;
        spec.stage = stage;
        spec.dtype = "bf16";
        spec.remainder_masters = true;
        spec.libtorch_exact = exact;
        spec.device = device;
        spec.moved = spec.device.empty() ? "nvme" : "cpu";
        spec.served = spec.shared = "off";
        ExpectEqualsOracle(spec, 2);
      }
    }
  }
}

// Parameters go where an early step of before has kept new ones in memory, and
// come back.
TEST(MovedStates, OfUnitsThatAreSteppedEarly) {
  for (const char* dtype : {"fp32", "bf16"}) {
    TrainingSpec spec;
    spec.model = "Gpt";
    spec.steps = 5;
    spec.stage = 3;
    spec.dtype = dtype;
    spec.device = "";
    spec.moved = "nvme";
    spec.states_on_disk = 1;
    spec.served = spec.shared = "off";
    ExpectEqualsOracle(spec, 2);
    if (HasFailure()) return;
  }
}

std::string BytesOf(const Engine& engine) {
  const StateBytes bytes = engine.state_bytes();
  return absl::StrCat(bytes.parameters > 0 ? "parameters " : "",
                      bytes.optimizer > 0 ? "optimizer " : "");
}

// `args` is "all" or another text. Returns which states take memory before,
// meanwhile and after.
TESSERA_RANK_FUNCTION(TakenMemory) {
  TrainingSpec spec;
  spec.stage = 3;
  spec.dtype = "bf16";
  spec.served = spec.shared = "off";
  auto model = BuildModel(spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, world.communicator()));
  Record record;
  spec.steps = 1;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, spec, world.rank(), 0, &record));
  std::string text = BytesOf(*engine);
  OffloadStates states;
  states.device = "nvme";
  states.nvme_path = TrainingSpec::SwapFolder();
  states.parameters = states.masters = args == "all";
  TESSERA_RETURN_IF_ERROR(engine->Offload(states));
  absl::StrAppend(&text, "| ", BytesOf(*engine), "| ");
  TESSERA_RETURN_IF_ERROR(engine->Reload());
  absl::StrAppend(&text, BytesOf(*engine));
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return text;
}

TEST(MovedStates, TakeNoMemoryMeanwhile) {
  EXPECT_THAT(
      RankPool::Get(2)->Run("TakenMemory", "all"),
      Each(IsOkAndHolds("parameters optimizer | | parameters optimizer ")));
  EXPECT_THAT(
      RankPool::Get(2)->Run("TakenMemory", "optimizer"),
      Each(IsOkAndHolds(
          "parameters optimizer | parameters | parameters optimizer ")));
}

// `args` is a folder, whose name may say which masters there are. A checkpoint
// is loaded while states are elsewhere, and a step follows; the parameters are
// those of the run that saved it.
TESSERA_RANK_FUNCTION(LoadsWhileMoved) {
  TrainingSpec spec;
  spec.remainder_masters = absl::EndsWith(args, "remainders");
  spec.stage = 3;
  spec.dtype = "bf16";
  spec.steps = 3;
  spec.served = spec.shared = "off";
  const auto make = [&](std::shared_ptr<TestModel>* model) {
    *model = BuildModel(spec.model, world.rank());
    return MakeEngine(*model, spec, world.communicator());
  };
  const auto train = [&](Engine& engine, TestModel& model, int first, int end) {
    TrainingSpec part = spec;
    part.steps = end;
    Record record;
    return TrainSteps(engine, model, part, world.rank(), first, &record);
  };
  std::shared_ptr<TestModel> model;
  TESSERA_ASSIGN_OR_RETURN(auto engine, make(&model));
  TESSERA_RETURN_IF_ERROR(train(*engine, *model, 0, 2));
  TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(std::string(args)));
  TESSERA_RETURN_IF_ERROR(train(*engine, *model, 2, 3));
  TESSERA_ASSIGN_OR_RETURN(const Record wanted, ParametersOf(*engine, *model));
  TESSERA_RETURN_IF_ERROR(engine->Close());

  TESSERA_ASSIGN_OR_RETURN(engine, make(&model));
  TESSERA_RETURN_IF_ERROR(train(*engine, *model, 0, 1));
  OffloadStates states;
  states.device = "nvme";
  states.nvme_path = TrainingSpec::SwapFolder();
  TESSERA_RETURN_IF_ERROR(engine->Offload(states));
  TESSERA_RETURN_IF_ERROR(engine->LoadCheckpoint(std::string(args)).status());
  TESSERA_RETURN_IF_ERROR(train(*engine, *model, 2, 3));
  TESSERA_ASSIGN_OR_RETURN(const Record got, ParametersOf(*engine, *model));
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return FirstDifference(wanted, got);
}

TEST(MovedStates, AreLoadedWhereTheyAre) {
  const TempFolder folder;
  for (const char* name : {"checkpoint", "remainders"}) {
    EXPECT_THAT(RankPool::Get(2)->Run("LoadsWhileMoved", folder / name),
                Each(IsOkAndHolds("")));
  }
}

// Returns Offload's errors for options that are not possible; the engine trains
// on.
TESSERA_RANK_FUNCTION(Refused) {
  TrainingSpec spec;
  spec.stage = 3;
  spec.steps = 1;
  spec.served = args == "served" ? "on" : "off";
  spec.shared = "off";
  auto model = BuildModel(spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, world.communicator()));
  OffloadStates states;
  states.device = args == "device" ? "cuda" : "nvme";
  if (args == "served" || args == "blocked") states.nvme_path = "/proc/no";
  const std::string said = engine->Offload(states).ToString();
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, spec, world.rank(), 0, &record));
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return said;
}

TEST(MovedStates, RefusalsSayWhatIsExpected) {
  const auto refused = [](const char* how) {
    return RankPool::Get(2)->Run("Refused", how);
  };
  EXPECT_THAT(refused("device"),
              Each(IsOkAndHolds(
                  HasSubstr("device: expected cpu or nvme, got \"cuda\""))));
  EXPECT_THAT(
      refused("path"),
      Each(IsOkAndHolds(HasSubstr("nvme_path: expected a folder, got none"))));
  EXPECT_THAT(refused("served"),
              Each(IsOkAndHolds(HasSubstr("sharding.served_gathers"))));
  EXPECT_THAT(refused("blocked"),
              Each(IsOkAndHolds(AllOf(HasSubstr("Engine::Offload: nvme_path"),
                                      HasSubstr("/proc/no")))));
}

}  // namespace
}  // namespace tessera
