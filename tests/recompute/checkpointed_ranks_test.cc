// Regions under an engine on several ranks: the oracle's bits at every stage;
// and inputs that the ranks of a group keep together.
#include <torch/torch.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "comm/world/world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sharding/recompute/checkpointed/checkpointed.h"
#include "tests/dispatch/held_bytes.h"
#include "tests/recompute/checkpointed_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

TEST(CheckpointedRanksTest, GiveTheOraclesBitsAtEveryStage) {
  TrainingSpec spec;
  spec.model = "Checkpointing";
  spec.gradients = true;
  spec.poison = true;
  spec.accumulation = 2;
  for (int stage : {0, 1, 2, 3}) {
    spec.stage = stage;
    for (int world_size : {1, 2}) ExpectEqualsOracle(spec, world_size);
  }
  spec.max_live_parameters = 0;
  ExpectEqualsOracle(spec, 2);
  spec.dtype = "bf16";
  ExpectEqualsOracle(spec, 2);
}

// The gradients of an input and of a weight; args: how the input is made.
TESSERA_RANK_FUNCTION(Partition) {
  torch::manual_seed(1);
  const int rank = world.communicator()->rank();
  Tensor x = torch::randn({5, 7}).t().requires_grad_(true);
  const Tensor w = torch::randn({5, 5}).requires_grad_(true);
  if (args == "other values" && rank == 1) x = x.detach() * 1.0001;
  if (args == "other sizes" && rank == 1) x = x.detach().narrow(0, 0, 4);
  CheckpointOptions options;
  options.name = "row";
  if (args != "plainly") options.partition_over = world.communicator();
  const auto f = [&w](const Tensor& t, const Tensor& mask) {
    return torch::mm(t.exp(), w).sin() * mask;
  };
  const Tensor mask = torch::rand({1, 5}).expand({x.size(0), 5});
  const Tensor y = Checkpointed(options, f, x.exp(), mask);
  const std::string error = ErrorOf([&] { y.sum().backward(); });
  if (!error.empty()) return error;
  return absl::StrCat(PrintOf(x.grad()), " ", PrintOf(w.grad()));
}

std::vector<std::string> RunPartition(const std::string& args) {
  std::vector<std::string> texts;
  for (const auto& answer : RankPool::Get(2)->Run("Partition", args)) {
    texts.push_back(answer.ok() ? *answer : answer.status().ToString());
  }
  return texts;
}

TEST(PartitionedInputsTest, GiveTheSameBits) {
  EXPECT_EQ(RunPartition("plainly"), RunPartition("in parts"));
}

TEST(PartitionedInputsTest, ThatDifferAreNamedOnAllRanks) {
  for (const char* args : {"other values", "other sizes"}) {
    for (const std::string& error : RunPartition(args)) {
      EXPECT_THAT(error, HasSubstr("[row] tensor 0 of the inputs differs "
                                   "between rank 0 and rank 1 of 2"));
    }
  }
}

// What a rank holds between forward and backward of an input.
TESSERA_RANK_FUNCTION(HoldParts) {
  CheckpointOptions options;
  options.check = CheckpointOptions::Check::kNever;
  if (args == "in parts") options.partition_over = world.communicator();
  const int64_t n = 1 << 16;
  const Tensor w = torch::ones({1}, torch::requires_grad());
  int64_t held = 0;
  HeldBytes bytes;
  const auto f = [&w](const Tensor& t) { return (t * w).exp().sum(); };
  Tensor y = Checkpointed(options, f, torch::ones({n}));
  held = HeldBytes::get();
  y.backward();
  return absl::StrCat(held / (4 * n / 8), " eighths");
}

TEST(PartitionedInputsTest, AreHeldInPartsOnly) {
  for (const auto& answer : RankPool::Get(2)->Run("HoldParts", "in parts")) {
    EXPECT_THAT(answer, IsOkAndHolds("4 eighths"));
  }
  for (const auto& answer : RankPool::Get(2)->Run("HoldParts", "")) {
    EXPECT_THAT(answer, IsOkAndHolds("8 eighths"));
  }
}

}  // namespace
}  // namespace tessera
