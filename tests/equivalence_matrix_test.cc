// Every stage at every world size gives the oracle's bits: losses at each step
// on each rank, gradients, final parameters, generators.
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/training.h"

namespace tessera {
namespace {

class MatrixTest : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  MatrixTest() { spec_.stage = std::get<0>(GetParam()); }
  int world_size() const { return std::get<1>(GetParam()); }
  TrainingSpec spec_;
};

std::string StageAndWorld(
    const ::testing::TestParamInfo<std::tuple<int, int>>& info) {
  return absl::StrCat("Stage", std::get<0>(info.param), "World",
                      std::get<1>(info.param));
}

// With a layer that is never used: skipped, not decayed.
TEST_P(MatrixTest, TwentySteps) {
  spec_.model = "Mlp";
  spec_.steps = 20;
  ExpectEqualsOracle(spec_, world_size());
}

TEST_P(MatrixTest, GradientsOfEveryStep) {
  spec_.model = "Gpt";
  spec_.steps = 3;
  spec_.gradients = true;
  ExpectEqualsOracle(spec_, world_size());
}

INSTANTIATE_TEST_SUITE_P(All, MatrixTest,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(1, 2, 3, 4)),
                         StageAndWorld);

using AccumulationTest = MatrixTest;

TEST_P(AccumulationTest, ThreeMicroBatchesPerStep) {
  spec_.model = "Mlp";
  spec_.steps = 20;
  spec_.accumulation = 3;
  ExpectEqualsOracle(spec_, world_size());
}

TEST_P(AccumulationTest, ThreeMicroBatchesOfRanksThatDiffer) {
  spec_.model = "ChangingRank";
  spec_.steps = 4;
  spec_.accumulation = 3;
  spec_.gradients = true;
  ExpectEqualsOracle(spec_, world_size());
}

INSTANTIATE_TEST_SUITE_P(All, AccumulationTest,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(2, 3)),
                         StageAndWorld);

}  // namespace
}  // namespace tessera
