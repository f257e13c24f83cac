#include "parallel/plan/tensor_plan.h"

#include <torch/torch.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "parallel/plan/planned_models_test_util.h"
#include "sharding/trace/construct_fake.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using at::Tensor;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

// A model whose products take longer than its exchanges.
PlannedNetOptions Large() {
  PlannedNetOptions options;
  options.layers = 3;
  options.dim = 1024;
  options.heads = options.key_heads = 16;
  options.words = 32000;
  return options;
}

PlannedNet Fake(const PlannedNetOptions& options) {
  auto made = ConstructFake([&] { return PlannedNet(options); });
  EXPECT_TRUE(made.ok()) << made.status();
  return *made;
}

absl::StatusOr<TensorPlan> PlanFor(PlannedNet net, int ranks) {
  return FindTensorPlan(
      *net,
      [&] {
        return net->Loss(torch::randint(30, {8, 512}));
      },
      ranks);
}

// "layers.0.q.weight 0", of the first block and what is outside of blocks.
std::vector<std::string> FirstParts(const TensorPlan& plan) {
  std::vector<std::string> parts;
  for (const PlannedPart& each : plan.parts) {
    if (absl::StartsWith(each.name, "layers.") &&
        !absl::StartsWith(each.name, "layers.0.")) {
      continue;
    }
    parts.push_back(absl::StrCat(each.name, " ", each.dim));
  }
  return parts;
}

const std::vector<std::string>& MegatronParts() {
  static const auto* const parts = new std::vector<std::string>{
      "words.weight 0",      "layers.0.q.weight 0",    "layers.0.q.bias 0",
      "layers.0.k.weight 0", "layers.0.k.bias 0",      "layers.0.v.weight 0",
      "layers.0.v.bias 0",   "layers.0.o.weight 1",    "layers.0.up.weight 0",
      "layers.0.up.bias 0",  "layers.0.down.weight 1", "head.weight 0"};
  return *parts;
}

// Four collectives a block, besides those of the table, the head and the loss.
int64_t MegatronCollectives(PlannedNetOptions options) {
  const int64_t blocks = std::exchange(options.layers, 0);
  options.llama = false;  // the norm does not count
  const auto outside = PlanFor(Fake(options), 2);
  EXPECT_TRUE(outside.ok()) << outside.status();
  return 4 * blocks + outside->collectives;
}

TEST(TensorPlanTest, DividesATransformerAsMegatronDoes) {
  PlannedNetOptions options = Large();
  options.layers = 24;
  const auto plan = PlanFor(Fake(options), 2);
  TESSERA_ASSERT_OK(plan);
  EXPECT_THAT(FirstParts(*plan),
              ::testing::UnorderedElementsAreArray(MegatronParts()));
  EXPECT_EQ(plan->parts.size(), 24u * 10 + 2);
  EXPECT_EQ(plan->collectives, MegatronCollectives(options));
  EXPECT_THAT(plan->gathered, IsEmpty());
  EXPECT_LT(plan->seconds, plan->whole_seconds);
  EXPECT_THAT(plan->ToString(),
              AllOf(HasSubstr("layers.*.o.weight     S(1)  x24\n"),
                    HasSubstr("head.weight           S(0)\n"),
                    HasSubstr(absl::StrCat(plan->collectives, " collectives")),
                    Not(HasSubstr(".o.bias"))));
}

TEST(TensorPlanTest, CountsElementsAndWork) {
  PlannedNetOptions options = Large();
  PlannedNet net = Fake(options);
  const auto two = PlanFor(net, 2), one = PlanFor(net, 1);
  TESSERA_ASSERT_OK(two);
  TESSERA_ASSERT_OK(one);
  int64_t numel = 0, whole = 0;
  for (const auto& each : net->named_parameters()) {
    numel += each.value().numel();
    const std::string& name = each.key();
    if (absl::StrContains(name, "n1") || absl::StrContains(name, "n2") ||
        absl::StartsWith(name, "norm") || absl::EndsWith(name, "o.bias") ||
        absl::EndsWith(name, "down.bias")) {
      whole += each.value().numel();
    }
  }
  EXPECT_EQ(two->whole_numel, whole);
  EXPECT_EQ(two->part_numel, (numel - whole) / 2);
  EXPECT_EQ(one->whole_numel, numel);
  EXPECT_EQ(2 * two->flops, one->flops);
  EXPECT_EQ(one->collectives, 0);
  // Each block sums four activations of float32.
  options.layers += 2;
  const auto deeper = PlanFor(Fake(options), 2);
  TESSERA_ASSERT_OK(deeper);
  EXPECT_EQ(deeper->bytes - two->bytes, 2 * 4 * (8 * 512) * options.dim * 4);
}

TEST(TensorPlanTest, DividesGatedProductsAndGroupsOfQueries) {
  PlannedNetOptions options = Large();
  options.llama = true;
  options.key_heads = 4;
  const auto plan = PlanFor(Fake(options), 4);
  TESSERA_ASSERT_OK(plan);
  EXPECT_THAT(
      FirstParts(*plan),
      UnorderedElementsAre("words.weight 0", "layers.0.q.weight 0",
                           "layers.0.k.weight 0", "layers.0.v.weight 0",
                           "layers.0.o.weight 1", "layers.0.gate.weight 0",
                           "layers.0.up.weight 0", "layers.0.down.weight 1",
                           "head.weight 0"));
  EXPECT_EQ(plan->collectives, MegatronCollectives(options));
}

// Two heads of keys are not divided by four ranks.
TEST(TensorPlanTest, LeavesHeadsWholeThatRanksDoNotDivide) {
  PlannedNetOptions options = Large();
  options.llama = true;
  options.key_heads = 2;
  const auto plan = PlanFor(Fake(options), 4);
  TESSERA_ASSERT_OK(plan);
  const std::vector<std::string> parts = FirstParts(*plan);
  EXPECT_THAT(parts, ::testing::IsSupersetOf({"layers.0.gate.weight 0",
                                              "layers.0.up.weight 0",
                                              "layers.0.down.weight 1"}));
  EXPECT_THAT(parts, Not(::testing::Contains("layers.0.k.weight 0")));
  EXPECT_THAT(plan->gathered, IsEmpty());
}

// Slices of [q | k | v] are no heads, and those of each of the three are.
TEST(TensorPlanTest, DividesTheGroupsOfAFusedProduct) {
  PlannedNetOptions options = Large();
  options.fused = true;
  PlannedNet net = Fake(options);
  const auto plan = PlanFor(net, 2);
  TESSERA_ASSERT_OK(plan);
  EXPECT_THAT(FirstParts(*plan),
              UnorderedElementsAre("words.weight 0", "layers.0.qkv.weight 0",
                                   "layers.0.qkv.bias 0", "layers.0.o.weight 1",
                                   "layers.0.up.weight 0", "layers.0.up.bias 0",
                                   "layers.0.down.weight 1", "head.weight 0"));
  EXPECT_THAT(plan->ToString(),
              AllOf(HasSubstr("layers.*.qkv.weight   S(0, 3 groups)  x3"),
                    HasSubstr("layers.*.qkv.bias     S(0, 3 groups)  x3")));
  EXPECT_THAT(plan->gathered, IsEmpty());

  auto divided = TensorPlanOf(
      *net, {{"layers.*.qkv", "colwise"}, {"layers.*.o", "rowwise"}}, 2);
  TESSERA_ASSERT_OK(divided);
  TESSERA_ASSERT_OK(MeasureTensorPlan(
      *net,
      [&] {
        return net->Loss(torch::randint(30, {8, 512}));
      },
      {}, &*divided));
  EXPECT_THAT(divided->gathered, ElementsAre("[layers.*.qkv] aten::view"));
  EXPECT_THAT(divided->ToString(),
              HasSubstr("gather: [layers.*.qkv] aten::view"));
  EXPECT_GT(divided->seconds, plan->seconds);
}

TEST(TensorPlanTest, DividesATiedTableOnce) {
  PlannedNetOptions options = Large();
  options.tied = true;
  const auto plan = PlanFor(Fake(options), 2);
  TESSERA_ASSERT_OK(plan);
  EXPECT_THAT(FirstParts(*plan), ::testing::Contains("words.weight 0"));
  EXPECT_EQ(plan->collectives, MegatronCollectives(options));
}

// Values of this many tokens are not computed.
TEST(TensorPlanTest, TakesManyTokens) {
  PlannedNet net = Fake(Large());
  auto plan =
      TensorPlanOf(*net, {{"words", "vocabulary"}, {"head", "vocabulary"}}, 2);
  TESSERA_ASSERT_OK(plan);
  TESSERA_ASSERT_OK(MeasureTensorPlan(
      *net,
      [&] {
        return net->Loss(torch::randint(30, {32, 1024}));
      },
      {}, &*plan));
  EXPECT_THAT(plan->gathered, IsEmpty());
  PlannedNetOptions options = Large();
  options.layers = 0;
  EXPECT_EQ(plan->collectives, MegatronCollectives(options));
}

TEST(TensorPlanTest, AlternatesAlongProductsOfOneShape) {
  constexpr int64_t kWide = 4096;
  auto net = ConstructFake([&] {
    nn::Sequential layers;
    for (int i = 0; i < 4; ++i) {
      layers->push_back(nn::Linear(kWide, kWide));
      layers->push_back(nn::ReLU());
    }
    return layers;
  });
  TESSERA_ASSERT_OK(net);
  const auto plan = FindTensorPlan(
      **net,
      [&] {
        return (*net)->forward(torch::randn({2048, kWide})).square().mean();
      },
      2);
  TESSERA_ASSERT_OK(plan);
  EXPECT_THAT(FirstParts(*plan),
              UnorderedElementsAre("0.weight 0", "0.bias 0", "2.weight 1",
                                   "4.weight 0", "4.bias 0", "6.weight 1"));
  EXPECT_EQ(plan->collectives, 2 + 1);  // the input has no gradient
}

TEST(TensorPlanTest, DividesExpertsAndNotTheirRouter) {
  auto net = ConstructFake([] { return PlannedMixture(4096); });
  TESSERA_ASSERT_OK(net);
  const auto plan = FindTensorPlan(
      **net,
      [&] {
        return (*net)->Loss(torch::randn({4096, 4096}));
      },
      2);
  TESSERA_ASSERT_OK(plan);
  EXPECT_EQ(plan->parts.size(), 4u * 3);
  EXPECT_THAT(plan->ToString(),
              AllOf(HasSubstr("experts.*.up.weight    S(0)  x4"),
                    HasSubstr("experts.*.down.weight  S(1)  x4"),
                    Not(HasSubstr("router"))));
}

TEST(TensorPlanTest, SaysThatNothingPays) {
  nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(3, 8, 3)), nn::ReLU(),
                     nn::Flatten(), nn::Linear(8 * 6 * 6, 10));
  const auto plan = FindTensorPlan(
      *net,
      [&] {
        return net->forward(torch::randn({4, 3, 8, 8})).square().mean();
      },
      2);
  TESSERA_ASSERT_OK(plan);
  EXPECT_THAT(plan->parts, IsEmpty());
  EXPECT_EQ(plan->collectives, 0);
  EXPECT_THAT(plan->ToString(),
              HasSubstr("all parameters stay whole. No way of dividing them"));
}

// Its weights could be divided, and gathered for each use.
TEST(TensorPlanTest, DividesNothingThatHasNoRule) {
  auto net = ConstructFake(
      [] { return nn::Conv2d(nn::Conv2dOptions(2048, 2048, 3)); });
  TESSERA_ASSERT_OK(net);
  const auto plan = FindTensorPlan(
      **net,
      [&] {
        return (*net)->forward(torch::randn({2, 2048, 8, 8})).square().mean();
      },
      2);
  TESSERA_ASSERT_OK(plan);
  EXPECT_THAT(plan->parts, IsEmpty());
}

TEST(TensorPlanTest, LeavesTheModuleAsItWas) {
  PlannedNetOptions options;
  PlannedNet net(options);
  net->words->weight.set_requires_grad(false);
  const Tensor tokens = torch::randint(30, {2, 5});
  net->Loss(tokens).backward();
  std::map<std::string, Tensor> values, gradients;
  std::map<std::string, const void*> data;
  for (const auto& each : net->named_parameters()) {
    values[each.key()] = each.value().detach().clone();
    gradients[each.key()] = each.value().grad();
    data[each.key()] = each.value().data_ptr();
  }
  const Tensor generator = at::detail::getDefaultCPUGenerator().get_state();
  TensorPlanOptions cheap;
  cheap.flops_per_second = 1;
  int calls = 0;
  const auto run = [&](int failing) {
    calls = 0;
    return FindTensorPlan(
        *net,
        [&] {
          const Tensor loss = net->Loss(torch::randint(30, {2, 5}));
          if (++calls == failing) throw std::runtime_error("no more");
          return loss;
        },
        2, cheap);
  };
  const auto plan = run(-1);
  TESSERA_ASSERT_OK(plan);
  EXPECT_FALSE(plan->parts.empty());
  EXPECT_THAT(run(1),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("no more")));
  TESSERA_EXPECT_OK(run(5));  // one way of dividing them is not possible
  for (const auto& each : net->named_parameters()) {
    const Tensor& p = each.value();
    EXPECT_EQ(p.data_ptr(), data[each.key()]) << each.key();
    EXPECT_TRUE(at::equal(p.detach(), values[each.key()])) << each.key();
    EXPECT_EQ(p.requires_grad(), each.key() != "words.weight");
    EXPECT_TRUE(p.grad().is_same(gradients[each.key()])) << each.key();
  }
  EXPECT_TRUE(
      at::equal(at::detail::getDefaultCPUGenerator().get_state(), generator));
  // Training goes on.
  const Tensor before = gradients["head.weight"].clone();
  net->Loss(tokens).backward();
  EXPECT_TRUE(at::equal(net->head->weight.grad(), before * 2));
}

TEST(TensorPlanTest, LeavesSharedMemoryWhole) {
  struct Twice : nn::Module {
    Twice() {
      const Tensor memory = torch::randn({2, 8, 8});
      a = register_parameter("a", memory[0]);
      b = register_parameter("b", memory[1]);
    }
    Tensor a, b;
  } net;
  TensorPlanOptions cheap;
  cheap.flops_per_second = 1;
  const auto plan = FindTensorPlan(
      net,
      [&] {
        return torch::ones({4, 8}).matmul(net.a).matmul(net.b).sum();
      },
      2, cheap);
  TESSERA_ASSERT_OK(plan);
  EXPECT_THAT(plan->parts, IsEmpty());
}

TEST(TensorPlanTest, TellsWhatCannotBeRun) {
  PlannedNet net = Fake({});
  EXPECT_THAT(
      FindTensorPlan(
          *net, [&] { return torch::full({}, net->head->weight.sum().item()); },
          2),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               HasSubstr("[head] aten::_local_scalar_dense")));
}

}  // namespace
}  // namespace tessera
