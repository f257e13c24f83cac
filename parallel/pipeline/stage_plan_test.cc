#include "parallel/pipeline/stage_plan.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// One parameter per unit, of these costs.
std::vector<PipelineParameter> Costs(const std::vector<double>& costs) {
  std::vector<PipelineParameter> parameters;
  for (const double cost : costs) {
    const std::string name = absl::StrCat("layers.", parameters.size());
    parameters.push_back({absl::StrCat(name, ".weight"), name, 1, cost});
  }
  return parameters;
}

std::vector<int> StagesOf(
    const std::vector<PipelineParameter>& parameters, int stages,
    PipelinePartition partition = PipelinePartition::kBest) {
  const auto plan = PlanStages(parameters, stages, partition, {});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? plan->stage : std::vector<int>();
}

// A transformer: an embedding that the root has, blocks, norm and head.
std::vector<PipelineParameter> Transformer() {
  return {{"embedding", "", 8, 1},
          {"layers.0.up.weight", "layers.0", 3, 2},
          {"layers.0.down.weight", "layers.0", 3, 2},
          {"layers.1.up.weight", "layers.1", 3, 2},
          {"layers.1.down.weight", "layers.1", 3, 2},
          {"layers.2.up.weight", "layers.2", 3, 2},
          {"layers.2.down.weight", "layers.2", 3, 2},
          {"norm", "", 1, 1},
          {"head", "", 8, 6}};
}

absl::StatusOr<PipelinePlan> Split(int stages,
                                   const std::vector<std::string>& points) {
  return PlanStages(Transformer(), stages, PipelinePartition::kBest, points);
}

TEST(StagePlanTest, TheMostExpensiveStageIsAsCheapAsItCanBe) {
  EXPECT_THAT(StagesOf(Costs({1, 1, 1, 1}), 2), ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(StagesOf(Costs({5, 1, 1, 1}), 2), ElementsAre(0, 1, 1, 1));
  EXPECT_THAT(StagesOf(Costs({1, 1, 1, 5}), 2), ElementsAre(0, 0, 0, 1));
  EXPECT_THAT(StagesOf(Costs({3, 1, 4, 1, 5}), 3), ElementsAre(0, 0, 1, 1, 2));
  EXPECT_THAT(StagesOf(Costs({1, 2, 3}), 1), ElementsAre(0, 0, 0));
  EXPECT_THAT(StagesOf(Costs({1, 2, 3}), 3), ElementsAre(0, 1, 2));
}

// The greatest cost leaves the others free.
TEST(StagePlanTest, TheOtherStagesAreEqualThen) {
  EXPECT_THAT(StagesOf(Costs({1, 1, 1, 1, 9}), 3), ElementsAre(0, 0, 1, 1, 2));
  EXPECT_THAT(StagesOf(Costs({9, 1, 1, 1, 1}), 3), ElementsAre(0, 1, 1, 2, 2));
}

TEST(StagePlanTest, OfEqualPlansTheEarlierCutIsTaken) {
  EXPECT_THAT(StagesOf(Costs({1, 1, 1}), 2), ElementsAre(0, 1, 1));
  EXPECT_THAT(StagesOf(Costs({0, 0, 0, 0}), 2, PipelinePartition::kBest),
              ElementsAre(0, 0, 1, 1));  // by elements
}

// Against all divisions.
TEST(StagePlanTest, NoPlanIsBetter) {
  std::srand(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<double> costs(3 + static_cast<size_t>(std::rand() % 6));
    for (double& cost : costs) cost = std::rand() % 10;
    costs[0] += 1;
    const size_t n = costs.size();
    double best = std::numeric_limits<double>::infinity();
    for (size_t a = 1; a + 1 < n; ++a) {
      for (size_t b = a + 1; b < n; ++b) {
        const auto sum = [&](size_t begin, size_t end) {
          return std::accumulate(costs.begin() + static_cast<long>(begin),
                                 costs.begin() + static_cast<long>(end), 0.0);
        };
        best = std::min(best, std::max({sum(0, a), sum(a, b), sum(b, n)}));
      }
    }
    const std::vector<int> stages = StagesOf(Costs(costs), 3);
    std::vector<double> sums(3, 0);
    for (size_t i = 0; i < n; ++i) {
      sums[static_cast<size_t>(stages[i])] += costs[i];
    }
    EXPECT_EQ(*std::max_element(sums.begin(), sums.end()), best);
    EXPECT_TRUE(std::is_sorted(stages.begin(), stages.end()));
    EXPECT_EQ(stages.front(), 0);
    EXPECT_EQ(stages.back(), 2);
  }
}

TEST(StagePlanTest, UnitsStayTogetherAndMayComeTwice) {
  EXPECT_THAT(StagesOf(Transformer(), 2),
              ElementsAre(0, 0, 0, 0, 0, 1, 1, 1, 1));
  EXPECT_THAT(StagesOf(Transformer(), 5),
              ElementsAre(0, 1, 1, 2, 2, 3, 3, 4, 4));
  EXPECT_THAT(PlanStages(Transformer(), 6, PipelinePartition::kBest, {}),
              StatusIs(StatusCode::kInvalidArgument,
                       "pipeline.stages 6: expected at least as many units, "
                       "got 5; name pipeline.split_points, choose smaller "
                       "units, or have fewer stages"));
  EXPECT_THAT(PlanStages({}, 1, PipelinePartition::kBest, {}),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("got 0")));
  EXPECT_THAT(PlanStages(Transformer(), 0, PipelinePartition::kBest, {}),
              StatusIs(StatusCode::kInvalidArgument,
                       "pipeline.stages: expected at least 1, got 0"));
}

TEST(StagePlanTest, WhatIsDividedMayBeChosen) {
  std::vector<PipelineParameter> parameters = Costs({1, 1, 1, 9});
  parameters[0].numel = 5;
  using P = PipelinePartition;
  EXPECT_THAT(StagesOf(parameters, 2, P::kBest), ElementsAre(0, 0, 0, 1));
  EXPECT_THAT(StagesOf(parameters, 2, P::kParameters), ElementsAre(0, 1, 1, 1));
  EXPECT_THAT(StagesOf(parameters, 2, P::kUniform), ElementsAre(0, 0, 1, 1));
  for (PipelineParameter& each : parameters) each.cost = 0;
  EXPECT_THAT(StagesOf(parameters, 2, P::kBest), ElementsAre(0, 1, 1, 1));
  // A unit of several parameters is one.
  EXPECT_THAT(StagesOf(Transformer(), 2, P::kUniform),
              ElementsAre(0, 0, 0, 1, 1, 1, 1, 1, 1));
}

TEST(StagePlanTest, APlanSaysWhy) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const PipelinePlan plan,
      PlanStages(Costs({1, 2, 3}), 2, PipelinePartition::kBest, {}));
  EXPECT_THAT(plan.share, ElementsAre(DoubleEq(0.5), DoubleEq(0.5)));
  EXPECT_EQ(plan.reason,
            "equal shares of predicted time, stages begin at "
            "'layers.0.weight' (50 %), 'layers.2.weight' (50 %)");
  TESSERA_ASSERT_OK_AND_ASSIGN(const PipelinePlan split, Split(2, {"norm"}));
  EXPECT_EQ(split.reason,
            "split_points, shares of predicted time, stages begin at "
            "'embedding' (65 %), 'norm' (35 %)");
}

TEST(StagePlanTest, StagesBeginAtSplitPoints) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const PipelinePlan modules,
                               Split(3, {"layers.1", "norm"}));
  EXPECT_THAT(modules.stage, ElementsAre(0, 0, 0, 1, 1, 1, 1, 2, 2));
  // Also within a unit.
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const PipelinePlan parameters,
      Split(4, {"layers.0.down", "layers.2.down.weight", "head"}));
  EXPECT_THAT(parameters.stage, ElementsAre(0, 0, 1, 1, 1, 1, 2, 2, 3));
}

TEST(StagePlanTest, FaultySplitPointsAreNamed) {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"layers.1", "hed"},
       "'hed' is not a parameter, nor a module that has some, did you mean "
       "'head'?"},
      {{"layers.1", "layer.2"}, "did you mean 'layers.2'?"},
      {{"layers.1", "layers.2.u"}, "'layers.2.u' is not a parameter"},
      {{"xyz", "head"},
       "'xyz' is not a parameter, nor a module that has some; expected a name "
       "as in named_parameters()"},
      {{"embedding", "norm"}, "'embedding' begins with the first parameter"},
      {{"layers", "layers.0"},
       "'layers.0' begins with 'layers.0.up.weight', where the "
       "stage before begins, too"},
      {{"norm", "layers.1"},
       "'layers.1' is used before 'norm', where an earlier stage begins; "
       "expected the order"},
      {{"norm"}, "expected 2 for pipeline.stages 3, got 1"},
  };
  for (const auto& [points, what] : cases) {
    EXPECT_THAT(Split(3, points),
                StatusIs(StatusCode::kInvalidArgument,
                         ::testing::AllOf(HasSubstr("pipeline.split_points: "),
                                          HasSubstr(what))));
  }
}

TEST(StagePlanTest, LayersAreFoundByNumbers) {
  const std::pair<const char*, const char*> cases[] = {
      {"layers.3.mlp.up.weight", "layers.3"},
      {"transformer.h.11.attn.c_attn.bias", "transformer.h.11"},
      {"layer1.0.conv1.weight", "layer1.0"},
      {"block3.norm1.weight", "block3"},
      {"0.weight", "0"},
      {"head.weight", "head"},
      {"model.norm.weight", "model.norm"},
      {"scale", ""},
      {"w1", ""},
  };
  for (const auto& [parameter, layer] : cases) {
    EXPECT_EQ(LayerOf(parameter), layer) << parameter;
  }
}

}  // namespace
}  // namespace tessera
