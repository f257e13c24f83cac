// Every model of tests/models/models.h, its modules computed again in backward
// without their knowing, gives the oracle's bits: losses, gradients,
// parameters, buffers (running statistics), generators.
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gtest/gtest.h"
#include "tests/models/models.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

// Model, policy, stage, world size.
class RecomputedModelTest
    : public ::testing::TestWithParam<
          std::tuple<std::string, std::string, int, int>> {
 protected:
  RecomputedModelTest() {
    spec_.model = std::get<0>(GetParam());
    spec_.recompute = absl::StrCat("auto/", std::get<1>(GetParam()));
    spec_.stage = std::get<2>(GetParam());
    spec_.gradients = true;
  }
  int world_size() const { return std::get<3>(GetParam()); }
  TrainingSpec spec_;
};

TEST_P(RecomputedModelTest, ThreeSteps) {
  ExpectEqualsOracle(spec_, world_size());
}

// Where gathers are collectives ranks must make the same ones.
TEST_P(RecomputedModelTest, WhateverIsGathered) {
  if (spec_.stage < 3 || world_size() == 1) return;
  spec_.shared = spec_.served = "off";
  spec_.max_reuse_distance = 0;
  spec_.poison = true;
  spec_.accumulation = 2;
  ExpectEqualsOracle(spec_, world_size());
}

std::string NameOf(
    const ::testing::TestParamInfo<RecomputedModelTest::ParamType>& info) {
  return absl::StrCat(
      std::get<0>(info.param), "_",
      absl::StrReplaceAll(std::get<1>(info.param), {{"/", "_"}}), "_Stage",
      std::get<2>(info.param), "World", std::get<3>(info.param));
}

INSTANTIATE_TEST_SUITE_P(
    Sharded, RecomputedModelTest,
    ::testing::Combine(::testing::ValuesIn(TestModelNamesForStage3()),
                       ::testing::Values("full/never", "selective/always"),
                       ::testing::Values(3), ::testing::Values(1, 2)),
    NameOf);

INSTANTIATE_TEST_SUITE_P(
    Replicated, RecomputedModelTest,
    ::testing::Combine(::testing::ValuesIn(TestModelNames()),
                       ::testing::Values("full/always"),
                       ::testing::Values(0, 2), ::testing::Values(2)),
    NameOf);

}  // namespace
}  // namespace tessera
