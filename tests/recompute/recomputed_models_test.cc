// Every model of tests/models/models.h, its modules computed again in backward
// without their knowing, gives the oracle's bits: losses, gradients,
// parameters, buffers (running statistics), generators. Over gloo, too.
#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gtest/gtest.h"
#include "tests/models/models.h"
#include "tests/support/pairwise.h"
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

// Stage {0, 1, 2, 3} x W {1, 2} x policy x accumulation {1, 2} x dtype, for
// each model: twelve cells in which every pair of values occurs.
const std::vector<std::string> kPolicies = {"full/always", "selective/never",
                                            "full/first"};
const std::vector<std::string> kDtypes = {"fp32", "bf16"};
const Choice kAxes = {4, 2, 3, 2, 2};

bool RunsAtStage3(const std::string& model) {
  static const std::vector<std::string> names = TestModelNamesForStage3();
  return std::find(names.begin(), names.end(), model) != names.end();
}

// Wider or complex parameters stay what they are; one that is frozen has no
// float32 master, and begins with rounded values, unlike the oracle's.
bool RunsInBfloat16(const std::string& model) {
  return model != "MixedDtype" && model != "Complex" && model != "Thawed";
}

class RecomputedCellsTest : public ::testing::TestWithParam<std::string> {};

TEST_P(RecomputedCellsTest, GiveTheOraclesBits) {
  static const std::vector<Choice> cells = Pairwise(kAxes, 12);
  TrainingSpec spec;
  spec.model = GetParam();
  spec.gradients = true;
  spec.fp32_norms = spec.model == "ConvNorm";  // its buffers are float32
  for (const Choice& c : cells) {
    spec.stage = static_cast<int>(c[0]);
    spec.recompute = absl::StrCat("auto/", kPolicies[c[2]]);
    spec.accumulation = static_cast<int>(c[3]) + 1;
    spec.dtype = kDtypes[RunsInBfloat16(spec.model) ? c[4] : 0];
    if (spec.stage == 3 && !RunsAtStage3(spec.model)) continue;
    SCOPED_TRACE(spec.ToText());
    ExpectEqualsOracle(spec, static_cast<int>(c[1]) + 1);
  }
}

INSTANTIATE_TEST_SUITE_P(All, RecomputedCellsTest,
                         ::testing::ValuesIn(TestModelNames()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace tessera
