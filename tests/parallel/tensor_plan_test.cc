// A plan that was found is run: over real ranks the module gives the loss and
// the gradients of the whole one, with as many collectives as were planned.

#include "parallel/plan/tensor_plan.h"

#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "parallel/plan/planned_models_test_util.h"
#include "parallel/tensor/placed.h"
#include "sharding/trace/traced_models_test_util.h"
#include "tests/parallel/tensor_programs.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

using at::Tensor;

struct PlannedCase {
  PlannedNetOptions net;
  size_t parts = 0;  // that a plan has at least
  // The patterns of a plan that is given; empty: it is found.
  std::vector<PartPattern> patterns;
};

const std::map<std::string, PlannedCase>& PlannedCases() {
  static const auto* const all = [] {
    auto* cases = new std::map<std::string, PlannedCase>;
    PlannedNetOptions fused, tied, llama, odd;
    fused.fused = true;
    tied.tied = true;
    llama.llama = true;
    llama.key_heads = 2;
    odd.llama = true;
    odd.key_heads = 3;  // so two ranks do not divide them
    (*cases)["gpt"] = {{}, 2 * 10 + 2, {}};
    (*cases)["fused"] = {fused, 2 * 6 + 2, {}};
    (*cases)["fused, by name"] = {
        fused,
        2 * 3,
        {{"layers.*.qkv", "colwise_qkv"}, {"layers.*.o", "rowwise"}}};
    (*cases)["tied"] = {tied, 2 * 10 + 1, {}};
    (*cases)["llama"] = {llama, 2 * 7 + 2, {}};
    (*cases)["odd heads"] = {odd, 2 * 3, {}};
    (*cases)["fused, gathered"] = {
        fused, 2 * 3, {{"layers.*.qkv", "colwise"}, {"layers.*.o", "rowwise"}}};
    (*cases)["odd heads, gathered"] = {odd,
                                       2 * 4,
                                       {{"layers.*.q", "colwise"},
                                        {"layers.*.k", "colwise"},
                                        {"layers.*.v", "colwise"},
                                        {"layers.*.o", "rowwise"}}};
    return cases;
  }();
  return *all;
}

PlannedNet MakeNet(const PlannedNetOptions& options) {
  torch::manual_seed(3);
  PlannedNet net(options);
  net->to(at::kDouble);
  return net;
}

// Has this rank hold what the plan says; returns its parts.
std::map<std::string, Tensor> DivideBy(
    const TensorPlan& plan, const torch::nn::Module& module,
    const std::shared_ptr<PartGroup>& group) {
  std::map<std::string, Tensor> mine;
  auto parameters = module.named_parameters();
  for (const auto& each : parameters) mine[each.key()] = each.value();
  for (const PlannedPart& each : plan.parts) {
    const Tensor& whole = parameters[each.name];
    const auto placement = TensorPlacement::Shard(each.dim, each.groups);
    const Tensor part = SlicePart(whole, placement, *group);
    mine[each.name] = part.requires_grad_(whole.requires_grad());
    PlaceInPlace(whole, part, placement, group);
  }
  return mine;
}

std::string Differences(const TensorPlan& plan, PlannedNet& whole,
                        const std::map<std::string, Tensor>& mine,
                        const PartGroup& group) {
  std::map<std::string, TensorPlacement> cuts;
  for (const PlannedPart& each : plan.parts) {
    cuts[each.name] = TensorPlacement::Shard(each.dim, each.groups);
  }
  std::string differ;
  for (const auto& each : whole->named_parameters()) {
    Tensor wanted = each.value().grad();
    const auto cut = cuts.find(each.key());
    if (cut != cuts.end()) wanted = SlicePart(wanted, cut->second, group);
    const Tensor got = mine.at(each.key()).grad();
    if (got.defined()) {
      differ += GradientDiffers(*whole, each.key(), got, wanted);
    } else {
      absl::StrAppend(&differ, each.key(), " has no gradient; ");
    }
  }
  return differ;
}

// So that small products are worth dividing.
TensorPlanOptions SlowProducts() {
  TensorPlanOptions options;
  options.flops_per_second = 1e6;
  options.seconds_per_collective = 0;
  return options;
}

absl::StatusOr<TensorPlan> PlanOfCase(const PlannedCase& wanted,
                                      PlannedNet& net, const Tensor& tokens,
                                      int ranks) {
  const TensorPlanOptions slow = SlowProducts();
  const auto loss = [&] { return net->Loss(tokens); };
  if (wanted.patterns.empty()) return FindTensorPlan(*net, loss, ranks, slow);
  TESSERA_ASSIGN_OR_RETURN(TensorPlan plan,
                           TensorPlanOf(*net, wanted.patterns, ranks));
  TESSERA_RETURN_IF_ERROR(MeasureTensorPlan(*net, loss, slow, &plan));
  return plan;
}

TESSERA_RANK_FUNCTION(RunFoundPlan) {
  const PlannedCase& wanted = PlannedCases().at(std::string(args));
  torch::manual_seed(4);
  const Tensor tokens = torch::randint(wanted.net.words, {2, 5});
  PlannedNet whole = MakeNet(wanted.net);
  const Tensor expected = whole->Loss(tokens);
  expected.backward();

  PlannedNet net = MakeNet(wanted.net);
  const auto group = std::make_shared<PartGroup>(world.communicator());
  const absl::StatusOr<TensorPlan> plan =
      PlanOfCase(wanted, net, tokens, group->size());
  if (!plan.ok()) return std::string(plan.status().message());
  if (plan->parts.size() < wanted.parts) return plan->ToString();
  const auto mine = DivideBy(*plan, *net, group);
  const Tensor loss = net->Loss(tokens);
  loss.backward();
  std::string wrong = Differences(*plan, whole, mine, *group);
  const double by = (loss - expected).abs().item<double>();
  if (!(by < 1e-13 * expected.item<double>())) {
    absl::StrAppend(&wrong, "loss by ", by, "; ");
  }
  if (group->collectives() != plan->collectives) {
    absl::StrAppend(&wrong, group->collectives(), " collectives; ");
  }
  return wrong.empty() ? wrong : absl::StrCat(wrong, plan->ToString());
}

class TensorPlanRunTest : public testing::TestWithParam<std::string> {};

TEST_P(TensorPlanRunTest, GivesWhatTheWholeModuleGives) {
  for (auto& answer : RankPool::Get(2)->Run("RunFoundPlan", GetParam())) {
    EXPECT_THAT(answer, IsOkAndHolds(""));
  }
}

std::vector<std::string> NamesOfCases() {
  std::vector<std::string> names;
  for (const auto& [name, each] : PlannedCases()) names.push_back(name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, TensorPlanRunTest,
                         testing::ValuesIn(NamesOfCases()));

// Models of other kinds (convolutions, recurrent layers, experts, autocast)
// make as many collectives as planned.
TESSERA_RANK_FUNCTION(CountExchangesOfAModel) {
  const auto& make = TracedModels().at(std::string(args));
  const TracedModel model = make();
  const auto group = std::make_shared<PartGroup>(world.communicator());
  const absl::StatusOr<TensorPlan> plan =
      FindTensorPlan(*model.module, model.loss, group->size(), SlowProducts());
  if (!plan.ok()) return std::string(plan.status().message());
  DivideBy(*plan, *model.module, group);
  Whole(model.loss()).backward();
  return group->collectives() == plan->collectives
             ? ""
             : absl::StrCat(group->collectives(), " collectives; ",
                            plan->ToString());
}

class TensorPlanModelsTest : public testing::TestWithParam<std::string> {};

TEST_P(TensorPlanModelsTest, ExchangeAsPlanned) {
  for (auto& answer :
       RankPool::Get(2)->Run("CountExchangesOfAModel", GetParam())) {
    EXPECT_THAT(answer, IsOkAndHolds(""));
  }
}

std::vector<std::string> NamesOfModels() {
  std::vector<std::string> names;
  for (const auto& [name, make] : TracedModels()) names.push_back(name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, TensorPlanModelsTest,
                         testing::ValuesIn(NamesOfModels()));

}  // namespace
}  // namespace tessera
