// Tests training on a GPU: the bits are those of the oracle on the same GPU
// (verify/oracle.h), which trains in the test's own process. Ranks are joined
// by TESSERA_TEST_BACKEND; over gloo one GPU serves them all.
//
//   W {1, 2, 3} x stage {0, 1, 2, 3} x {fp32, bf16, bf16 and accumulation,
//   fp16 and clipping}; and a run that resumes
//
// Skips where there is no GPU. TESSERA_GPU_TEST_DEVICE=cpu trains on the CPU
// instead, which shows that the test itself works.
#include <torch/torch.h>

#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/env.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

constexpr int kSteps = 4;
constexpr int kSavedAt = 2;

// `args` is "<spec>\n<folder>".
TESSERA_RANK_FUNCTION(SaveAndResume) {
  const std::vector<std::string> lines = absl::StrSplit(args, '\n');
  TrainingSpec spec = TrainingSpec::FromText(lines.at(0));
  Record record, after;
  {
    auto model = BuildModel(spec.model, world.rank());
    TESSERA_ASSIGN_OR_RETURN(auto engine,
                             MakeEngine(model, spec, world.communicator()));
    spec.steps = kSavedAt;
    TESSERA_RETURN_IF_ERROR(
        TrainSteps(*engine, *model, spec, world.rank(), 0, &record));
    TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(lines.at(1)));
    // Later steps are not part of the checkpoint.
    spec.steps = kSavedAt + 1;
    TESSERA_RETURN_IF_ERROR(
        TrainSteps(*engine, *model, spec, world.rank(), kSavedAt, &after));
  }
  torch::manual_seed(99);
  auto model = MakeTestModel(spec.model);
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(engine->LoadCheckpoint(lines.at(1)).status());
  spec.steps = kSteps;
  TESSERA_RETURN_IF_ERROR(TrainSteps(*engine, *model, spec, world.rank(),
                                     static_cast<int>(engine->step()),
                                     &record));
  TESSERA_RETURN_IF_ERROR(AddFinalState(*engine, *model, &record));
  return ToText(record);
}

class EngineGpuTest : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  void SetUp() override {
    std::tie(world_size_, spec_.stage) = GetParam();
    spec_.model = "Gpt";  // with dropout: the generator's state matters
    spec_.device = EnvString("TESSERA_GPU_TEST_DEVICE").value_or("cuda:0");
    if (spec_.device != "cpu" && !torch::cuda::is_available()) {
      GTEST_SKIP() << "no GPU";
    }
  }

  int world_size_ = 1;
  TrainingSpec spec_;
};

TEST_P(EngineGpuTest, Fp32) { ExpectEqualsOracle(spec_, world_size_); }

TEST_P(EngineGpuTest, Bf16) {
  spec_.dtype = "bf16";
  ExpectEqualsOracle(spec_, world_size_);
}

TEST_P(EngineGpuTest, Bf16Accumulation) {
  spec_.dtype = "bf16";
  spec_.accumulation = 3;
  ExpectEqualsOracle(spec_, world_size_);
}

TEST_P(EngineGpuTest, Fp16Clipping) {
  spec_.dtype = "fp16";
  spec_.initial_scale_power = 12;
  spec_.clipping = 0.5;
  spec_.outcomes = true;
  ExpectEqualsOracle(spec_, world_size_);
}

// States, gradients and parameters in the host's memory, or states on a disk.
TEST_P(EngineGpuTest, StatesOnTheHost) {
  if (spec_.stage == 0) GTEST_SKIP() << "stage 0 shards none";
  for (const char* dtype : {"fp32", "bf16"}) {
    for (const char* tier : {"cpu", "nvme"}) {
      spec_.dtype = dtype;
      spec_.tier = tier;
      spec_.states_on_disk = 1;
      spec_.clipping = 0.5;
      const bool moves = spec_.stage == 3 && spec_.tier == "cpu";
      spec_.parameters_in_memory = moves ? 0 : -1;
      ExpectEqualsOracle(spec_, world_size_);
    }
  }
}

TEST_P(EngineGpuTest, StatesThatMoveToTheHostForAWhile) {
  spec_.steps = 4;
  spec_.moved = "cpu";
  ExpectEqualsOracle(spec_, world_size_);
}

TEST_P(EngineGpuTest, AResumedRunIsTheOneThatDidNotStop) {
  spec_.steps = kSteps;
  const TempFolder folder;
  const std::string args = absl::StrCat(spec_.ToText(), "\n", folder / "ckpt");
  const auto answers = RankPool::Get(world_size_)->Run("SaveAndResume", args);
  const auto& expected = TrainWithOracle(spec_, world_size_);
  for (int rank = 0; rank < world_size_; ++rank) {
    ASSERT_TRUE(answers[rank].ok()) << answers[rank].status();
    EXPECT_EQ(FirstDifference(expected[rank], RecordFromText(*answers[rank])),
              "")
        << "rank " << rank;
  }
}

INSTANTIATE_TEST_SUITE_P(All, EngineGpuTest,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(0, 1, 2, 3)),
                         [](const auto& info) {
                           return absl::StrCat("World", std::get<0>(info.param),
                                               "Stage",
                                               std::get<1>(info.param));
                         });

}  // namespace
}  // namespace tessera
