#include <torch/torch.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "parallel/plan/planned_models_test_util.h"
#include "parallel/plan/tensor_plan.h"

namespace tessera {
namespace {

using at::Tensor;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

PlannedNet Net() { return PlannedNet(PlannedNetOptions()); }

// "layers.0.q.weight 0".
std::vector<std::string> Parts(const TensorPlan& plan) {
  std::vector<std::string> parts;
  for (const PlannedPart& each : plan.parts) {
    parts.push_back(absl::StrCat(each.name, " ", each.dim));
  }
  return parts;
}

TEST(TensorPlanOfTest, FollowsPatterns) {
  PlannedNet net = Net();
  const auto plan = TensorPlanOf(*net,
                                 {{"layers.1.*", "whole"},
                                  {"layers.*.up", "colwise"},
                                  {"layers.*.down", "rowwise"},
                                  {"layers.*.o", "1"},
                                  {"layers.*.q.weight", "0"},
                                  {"words", "vocabulary"}},
                                 3);
  TESSERA_ASSERT_OK(plan);
  EXPECT_THAT(
      Parts(*plan),
      UnorderedElementsAre("words.weight 0", "layers.0.q.weight 0",
                           "layers.0.o.weight 1", "layers.0.up.weight 0",
                           "layers.0.up.bias 0", "layers.0.down.weight 1"));
  EXPECT_EQ(plan->parts.size(), 6u);
  EXPECT_EQ(plan->part_numel, (30 * 24 + 24 * 24 * 2 + 96 * 24 * 2 + 96) / 3);
}

TEST(TensorPlanOfTest, RefusesWrongPatterns) {
  PlannedNet net = Net();
  const auto refused = [&](const PartPattern& pattern, const char* why) {
    EXPECT_THAT(TensorPlanOf(*net, {pattern}, 5),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  };
  refused({"layers.*.upp", "colwise"},
          "tensor plan: 'layers.*.upp' is not a parameter or module");
  refused({"wods.weight", "0"}, "such as 'words.weight'");
  refused({"layers.0.q.weight", "0"},
          "'layers.0.q.weight' divides parameter 'layers.0.q.weight' [24, 24] "
          "along dimension 0 among 5 ranks, which cannot be: expected a size "
          "there that 5 divides");
  refused({"layers.0.q.bias", "1"}, "[24] along dimension 1");
  refused({"words", "colums"}, "is to be divided 'colums'; expected");
  EXPECT_THAT(TensorPlanOf(*net, {}, 0),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(TensorPlanOfTest, RefusesWhatSharesMemory) {
  struct Twice : torch::nn::Module {
    Twice() {
      const Tensor memory = torch::randn({2, 8, 8});
      register_parameter("a", memory[0]);
      register_parameter("b", memory[1]);
    }
  } net;
  EXPECT_THAT(TensorPlanOf(net, {{"a", "0"}}, 2),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("it shares memory with another parameter")));
}

TEST(TensorPlanOfTest, MeasuresOnlyParametersOfTheModule) {
  PlannedNet net = Net();
  TensorPlan plan;
  plan.ranks = 2;
  plan.parts = {{"layers.7.q.weight", 0}};
  EXPECT_THAT(MeasureTensorPlan(
                  *net,
                  [&] {
                    return net->Loss(torch::randint(30, {2, 5}));
                  },
                  {}, &plan),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("has no parameter 'layers.7.q.weight'")));
}

}  // namespace
}  // namespace tessera
