#include "parallel/pipeline/traced_costs.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "sharding/trace/trace.h"
#include "sharding/trace/traced_models_test_util.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

using Kind = TraceEvent::Kind;

// A module of one tensor for each parameter of a made-up trace.
struct MadeUp {
  std::vector<at::Tensor> tensors;
  Trace trace;

  explicit MadeUp(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      tensors.push_back(at::zeros({static_cast<int64_t>(tensors.size()) + 1}));
      trace.parameters.push_back(
          {name, tensors.back().unsafeGetTensorImpl(), 4, true});
    }
  }
  void Add(Kind kind, int32_t what, int32_t unit, int64_t flops = 0,
           int64_t moved_bytes = 0) {
    TraceEvent event;
    event.kind = kind;
    event.what = what;
    event.unit = unit;
    event.flops = flops;
    event.moved_bytes = moved_bytes;
    trace.events.push_back(event);
  }
};

TEST(TracedCostsTest, OperatorsAreChargedToTheirParameter) {
  MadeUp model({"never.weight", "second.weight", "first.weight"});
  model.Add(Kind::kOperator, 0, -1, 0, 10);  // before the first
  model.Add(Kind::kBegin, 2, 2);
  model.Add(Kind::kTouch, 2, 2);
  model.Add(Kind::kOperator, 0, 2, 100, 10);
  model.Add(Kind::kTouch, 1, 1);
  model.Add(Kind::kOperator, 0, 1, 100, 200);
  model.Add(Kind::kTouch, 2, 1);
  model.Add(Kind::kAllocate, 0, 1);
  model.Add(Kind::kOperator, 0, 2, 400, 0);
  model.trace.events.back().backward = true;
  TracedCostOptions options;
  options.flops_per_second = 10;
  options.bytes_per_second = 10;
  const std::vector<PipelineParameter> costs = CostsOf(model.trace, options);
  ASSERT_EQ(costs.size(), 3);
  EXPECT_EQ(costs[0].name, "first.weight");
  EXPECT_EQ(costs[0].unit, "first");
  EXPECT_EQ(costs[0].numel, 3);
  EXPECT_EQ(costs[0].cost, 1 + 10 + 40);
  EXPECT_EQ(costs[1].name, "second.weight");
  EXPECT_EQ(costs[1].cost, 20);
  EXPECT_EQ(costs[2].name, "never.weight");
  EXPECT_EQ(costs[2].cost, 0);
  EXPECT_TRUE(CostsOf(Trace()).empty());
}

class TracedModelCosts : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    model_ = TracedModels().at(GetParam())();
    TESSERA_ASSERT_OK_AND_ASSIGN(trace_,
                                 TakeTrace(*model_.module, model_.loss));
  }
  TracedModel model_;
  Trace trace_;
};

TEST_P(TracedModelCosts, AreOfAllParametersAndCanBePlanned) {
  const std::vector<PipelineParameter> costs = CostsOf(trace_);
  std::set<std::string> names, given;
  for (const PipelineParameter& each : costs) {
    EXPECT_GE(each.cost, 0);
    EXPECT_GT(each.numel, 0);
    names.insert(each.name);
  }
  for (const TracedParameter& each : trace_.parameters) given.insert(each.name);
  EXPECT_EQ(names, given);
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const PipelinePlan plan,
      PlanStages(costs, 2, PipelinePartition::kBest, {}));
  EXPECT_TRUE(std::is_sorted(plan.stage.begin(), plan.stage.end()));
  EXPECT_GT(plan.share[0], 0.1) << plan.reason;
  EXPECT_GT(plan.share[1], 0.1) << plan.reason;
}

INSTANTIATE_TEST_SUITE_P(All, TracedModelCosts,
                         ::testing::Values("Mlp", "Gpt", "Llama", "Encoder",
                                           "Frozen"));

TEST(TracedCostsTest, ATransformerIsCutInTheMiddle) {
  const TracedModel model = TracedModels().at("Gpt")();
  TESSERA_ASSERT_OK_AND_ASSIGN(const Trace trace,
                               TakeTrace(*model.module, model.loss));
  // Between blocks, of which there are three.
  const std::vector<PipelineParameter> costs = CostsOf(trace);
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const PipelinePlan plan,
      PlanStages(costs, 2, PipelinePartition::kBest, {}));
  for (size_t i = 0; i < costs.size(); ++i) {
    const std::string& name = costs[i].name;
    if (absl::StartsWith(name, "token") || absl::StartsWith(name, "position") ||
        absl::StartsWith(name, "block0")) {
      EXPECT_EQ(plan.stage[i], 0) << name;
    }
    if (absl::StartsWith(name, "head") || absl::StartsWith(name, "norm") ||
        absl::StartsWith(name, "block2")) {
      EXPECT_EQ(plan.stage[i], 1) << name;
    }
  }
  // Between layers.
  TracedCostOptions fine;
  fine.unit = [](const std::string& name) {
    return name.substr(0, name.rfind('.'));
  };
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const PipelinePlan halves,
      PlanStages(CostsOf(trace, fine), 2, PipelinePartition::kBest, {}));
  EXPECT_NEAR(halves.share[0], 0.5, 0.06) << halves.reason;
}

}  // namespace
}  // namespace tessera
