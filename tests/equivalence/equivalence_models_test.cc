// Every model of tests/models/models.h gives the oracle's bits, with each unit
// freed and poisoned after each use, buffers included.
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/models/models.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

// The parameters are model, stage and world size.
class ModelTest
    : public ::testing::TestWithParam<std::tuple<std::string, int, int>> {
 protected:
  ModelTest() {
    spec_.model = std::get<0>(GetParam());
    spec_.stage = std::get<1>(GetParam());
    spec_.gradients = true;
    // A single rank holds the only copy, unless freed memory is poisoned.
    spec_.poison = world_size() > 1;
    spec_.max_live_parameters = 0;
  }
  int world_size() const { return std::get<2>(GetParam()); }
  TrainingSpec spec_;
};

TEST_P(ModelTest, ThreeSteps) { ExpectEqualsOracle(spec_, world_size()); }

TEST_P(ModelTest, TwoMicroBatchesPerStep) {
  spec_.accumulation = 2;
  ExpectEqualsOracle(spec_, world_size());
}

std::string ModelStageAndWorld(
    const ::testing::TestParamInfo<std::tuple<std::string, int, int>>& info) {
  return absl::StrCat(std::get<0>(info.param), "Stage", std::get<1>(info.param),
                      "World", std::get<2>(info.param));
}

INSTANTIATE_TEST_SUITE_P(
    Sharded, ModelTest,
    ::testing::Combine(::testing::ValuesIn(TestModelNamesForStage3()),
                       ::testing::Values(3), ::testing::Values(1, 2)),
    ModelStageAndWorld);

INSTANTIATE_TEST_SUITE_P(
    Replicated, ModelTest,
    ::testing::Combine(::testing::ValuesIn(TestModelNames()),
                       ::testing::Values(0, 1, 2), ::testing::Values(2)),
    ModelStageAndWorld);

// These models have parameters without a gradient on some rank.
INSTANTIATE_TEST_SUITE_P(
    ThreeRanks, ModelTest,
    ::testing::Combine(::testing::Values("OneRank", "ChangingRank"),
                       ::testing::Values(0, 1, 2, 3), ::testing::Values(3)),
    ModelStageAndWorld);

// Earlier work must not change the result.
TEST(LiveParameters, GiveTheSameBitsWhateverTheirNumber) {
  for (int64_t max_live : {0, 1, 5000, 1000000}) {
    TrainingSpec spec;
    spec.model = "Gpt";
    spec.stage = 3;
    spec.max_live_parameters = max_live;
    spec.poison = true;
    SCOPED_TRACE(max_live);
    ExpectEqualsOracle(spec, 2);
  }
}

TEST(NeverTrained, GivesTheSameBitsInSixteenBits) {
  for (const char* dtype : {"bf16", "fp16"}) {
    for (int stage : {0, 2, 3}) {
      TrainingSpec spec;
      spec.model = "NeverTrained";
      spec.dtype = dtype;
      spec.stage = stage;
      spec.clipping = 0.1;
      spec.outcomes = true;
      SCOPED_TRACE(spec.ToText());
      ExpectEqualsOracle(spec, 2);
    }
  }
}

}  // namespace
}  // namespace tessera
