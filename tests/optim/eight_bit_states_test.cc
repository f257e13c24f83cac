// States of 8 bits with an engine, besides what is so of each optimizer
// (optimizers_test.cc): tiers and saves while they change, checkpoints of and
// for other states, and by name.
#include <torch/torch.h>

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/optim/optimizer_run.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

size_t NumberOf(absl::string_view name) {
  size_t number = 0;
  while (kOptimizerCases[number].name != name) ++number;
  return number;
}

std::vector<std::string> TrainEightBits(int world_size,
                                        const std::string& words) {
  return RunOnRanks(
      world_size, "TrainWith",
      absl::StrCat("optimizer=", NumberOf("EightBits"), " ", words));
}

TEST(EightBitStatesTest, MoveAndAreSavedAsTheyWereAtTheCall) {
  const std::vector<std::string> whole = TrainEightBits(2, "stage=3 steps=4");
  EXPECT_EQ(TrainEightBits(2, "stage=3 steps=4 moved=1"), whole);
  EXPECT_EQ(TrainEightBits(2, "stage=1 steps=4 moved=1"), whole);
  const TempFolder folder;
  for (const char* how : {"stage=0", "stage=2", "stage=3 offload=nvme"}) {
    const std::string dir = absl::StrCat(folder.path(), "/", how);
    const std::string save = absl::StrReplaceAll(dir, {{" ", "_"}});
    TrainEightBits(2, absl::StrCat(how, " steps=2 async=1 save=", save));
    EXPECT_EQ(
        TrainEightBits(2, absl::StrCat("stage=1 first=2 steps=2 load=", save)),
        whole)
        << how;
  }
}

// A checkpoint has them as float32: states of any kind can be loaded into
// others.
TEST(EightBitStatesTest, ComeFromOthersAndGoThere) {
  const TempFolder folder;
  const auto dir = [&](const std::string& name) {
    return absl::StrCat(folder.path(), "/", name, " ");
  };
  for (const std::string from : {"fp32", "bf16"}) {
    TrainEightBits(
        2, absl::StrCat("states=", from, " stage=3 steps=2 save=", dir(from)));
    const auto go_on = [&](const std::string& how, const std::string& load) {
      return TrainEightBits(
          2, absl::StrCat(how, " first=2 steps=2 load=", dir(load)));
    };
    const auto expected = go_on("stage=2", from);
    EXPECT_NE(expected, go_on("states=fp32 stage=2", from));
    EXPECT_EQ(expected, go_on("stage=3 offload=nvme", from));
    // States go to 8 bits, from there to float32, and back to 8.
    const std::string eight = from + "_8bit", back = from + "_back";
    TrainEightBits(1, absl::StrCat("stage=0 steps=0 load=", dir(from),
                                   "save=", dir(eight)));
    TrainEightBits(2, absl::StrCat("states=fp32 stage=3 steps=0 load=",
                                   dir(eight), "save=", dir(back)));
    EXPECT_EQ(expected, go_on("stage=3", eight));
    EXPECT_EQ(expected, go_on("stage=1", back));
  }
}

// States that are read by name are float32. `args` has "stage" words.
TESSERA_RANK_FUNCTION(EightBitStatesByName) {
  const Words words(args);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel("Mlp", world.rank()), ConfigOf(words),
                               world.communicator()));
  for (int i = 0; i < 2; ++i) {
    TESSERA_RETURN_IF_ERROR(t.Backward(i));
    TESSERA_RETURN_IF_ERROR(t.engine->Step());
  }
  Engine& engine = *t.engine;
  std::string record;
  const auto states = [&]() -> absl::StatusOr<std::vector<at::Tensor>> {
    std::vector<at::Tensor> all;
    for (const char* name : {"in.weight", "in.bias"}) {
      for (const char* state : {"exp_avg", "exp_avg_sq"}) {
        TESSERA_ASSIGN_OR_RETURN(const at::Tensor numbers,
                                 engine.OptimizerStateOf(name, state));
        TORCH_CHECK(numbers.scalar_type() == at::kFloat);
        absl::StrAppend(&record, PrintOf(numbers), "\n");
        all.push_back(numbers);
      }
    }
    return all;
  };
  TESSERA_ASSIGN_OR_RETURN(const auto before, states());
  // Setting the same numbers gives the same bits; others are rounded.
  TESSERA_RETURN_IF_ERROR(
      engine.SetOptimizerState("in.weight", "exp_avg_sq", before[1]));
  const at::Tensor set =
      torch::linspace(0.5, 1, before[2].numel()).view_as(before[2]);
  // What is behind it in its block is NaN in between.
  TESSERA_RETURN_IF_ERROR(engine.SetOptimizerState("in.bias", "exp_avg",
                                                   torch::full_like(set, NAN)));
  TESSERA_RETURN_IF_ERROR(engine.SetOptimizerState("in.bias", "exp_avg", set));
  TESSERA_ASSIGN_OR_RETURN(const auto after, states());
  for (const size_t same : {0, 1, 3}) {
    TORCH_CHECK(after[same].equal(before[same]), same);
  }
  TORCH_CHECK(!after[2].equal(set) && at::allclose(after[2], set, 0x1p-4, 0));
  TESSERA_RETURN_IF_ERROR(t.Backward(2));
  TESSERA_RETURN_IF_ERROR(engine.Step());
  TESSERA_ASSIGN_OR_RETURN(const std::string end, t.Finish());
  return record + end;
}

TEST(EightBitStatesTest, AreNumbersByName) {
  const auto run = [](const std::string& how) {
    return RunOnRanks(
        2, "EightBitStatesByName",
        absl::StrCat("optimizer=", NumberOf("EightBits"), " ", how));
  };
  const std::vector<std::string> expected = run("stage=0");
  EXPECT_THAT(expected, Each(HasSubstr("parameter in.weight")));
  for (const char* how : {"stage=2", "stage=3", "stage=3 offload=nvme"}) {
    EXPECT_EQ(run(how), expected) << how;
  }
}

}  // namespace
}  // namespace tessera
