// Tests adaptive gradient clipping: it has the oracle's bits at every stage and
// number of ranks, and plain libtorch's within a bound. Also tests what is
// refused.
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"
#include "verify/oracle_norm.h"
#include "verify/verify.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// Clips most units of these models, and leaves some.
constexpr double kClipping = 0.02;
constexpr char kGroups[] =
    "type:'AdamW',params{lr:0.01,weight_decay:0.1},"
    "param_groups{name:'head',parameters:'out.*',adaptive_gradient_clipping:0},"
    "param_groups{name:'first',parameters:'blocks.0.*',"
    "adaptive_gradient_clipping:0.001,gradient_clipping:0.01}";

class AdaptiveClippingTest : public ::testing::TestWithParam<int> {
 protected:
  AdaptiveClippingTest() {
    spec_.stage = GetParam();
    spec_.adaptive = kClipping;
    spec_.clipping = 0.05;
    spec_.outcomes = true;
  }
  void ExpectOracle() {
    for (const int world_size : {1, 2, 3}) {
      ExpectEqualsOracle(spec_, world_size);
    }
  }
  // On two ranks, or on one and three: what a stage leaves out the next one
  // runs.
  void ExpectOracleOfSome(int cell) {
    for (const int world_size : {1, 2, 3}) {
      if ((cell + GetParam() + world_size) % 2 != 0) continue;
      ExpectEqualsOracle(spec_, world_size);
    }
  }
  TrainingSpec spec_;
};

TEST_P(AdaptiveClippingTest, Models) {
  int cell = 0;
  for (const char* model : {"Mlp", "Gpt", "ConvNorm", "SharedStorage", "Tied",
                            "Views", "Complex", "Frozen", "MixedDtype"}) {
    spec_.model = model;
    ExpectOracleOfSome(cell++);
  }
}

TEST_P(AdaptiveClippingTest, Alone) {
  spec_.clipping = 0;
  spec_.outcomes = false;
  spec_.gradients = true;
  ExpectOracle();
}

// It comes between clipping by value and by the norm, also with scaled and
// weighted gradients.
TEST_P(AdaptiveClippingTest, WithWhatElseChangesGradients) {
  int cell = 0;
  spec_.clipping_value = 0.01;
  ExpectOracleOfSome(cell++);
  spec_.optimizer = kGroups;
  for (const char* dtype : {"bf16", "fp16"}) {
    spec_.dtype = dtype;
    ExpectOracleOfSome(cell++);
  }
  spec_.dtype = "fp32";
  spec_.accumulation = 2;
  spec_.weights = true;
  ExpectOracleOfSome(cell);
}

// The group that says so alone.
TEST_P(AdaptiveClippingTest, OneGroup) {
  spec_.adaptive = 0;
  spec_.optimizer = kGroups;
  ExpectOracle();
}

// A unit that is not finite stays so, and the step is skipped.
TEST_P(AdaptiveClippingTest, OverflowsStay) {
  spec_.model = "Overflows";
  spec_.steps = 9;
  spec_.dtype = "fp16";
  spec_.initial_scale_power = 8;
  spec_.loss_scale_window = 2;
  spec_.hysteresis = 1;
  ExpectOracle();
}

TEST_P(AdaptiveClippingTest, OfReplicas) {
  if (spec_.stage == 0) GTEST_SKIP() << "there are no shard groups";
  spec_.shard_group = 2;
  ExpectEqualsOracle(spec_, 4);
}

INSTANTIATE_TEST_SUITE_P(Stages, AdaptiveClippingTest,
                         ::testing::Values(0, 1, 2, 3), [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

TEST(AdaptiveClippingOffloadTest, IsTheSame) {
  TrainingSpec spec;
  spec.stage = 3;
  spec.adaptive = kClipping;
  spec.states_on_disk = 1;
  for (const bool gradients : {false, true}) {
    spec.gradients_on_disk = gradients;
    ExpectEqualsOracle(spec, 2);
  }
}

// ---- units that lie otherwise in memory

struct Odd : torch::nn::Module {
  Odd() {
    const auto add = [&](const char* name, const at::Tensor& t) {
      return register_parameter(name, t);
    };
    const auto normal = [](at::IntArrayRef sizes) {
      return torch::randn(sizes, at::kFloat);
    };
    parts = {
        add("rows", normal({5, 67})),
        add("blocks", normal({3, 128})),
        add("columns", normal({70, 9}).t()),
        add("middle", normal({4, 6, 5}).transpose(0, 1)),
        add("thin", normal({130, 1})),
        add("one", normal({1, 200})),
        add("number", torch::randn({}, at::kFloat)),
        add("last",
            normal({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast))};
  }
  at::Tensor Loss(int rank, int64_t micro_batch) const {
    at::Tensor loss = torch::zeros({});
    for (const at::Tensor& p : parts) {
      const at::Tensor ramp =
          torch::arange(p.numel(), at::kFloat).view(p.sizes()) - 30;
      loss = loss + (p * ramp).square().sum() * (rank + micro_batch + 1) * 1e-4;
    }
    return loss;
  }
  std::vector<at::Tensor> parts;
};

// args: the stage.
TESSERA_RANK_FUNCTION(VerifyOdd) {
  TrainingSpec spec;
  spec.stage = std::stoi(std::string(args));
  spec.adaptive = kClipping;
  VerifyOptions options;
  options.engine.communicator = world.communicator();
  const auto report =
      Verify([] { return std::make_shared<Odd>(); }, ConfigOf(spec),
             [](torch::nn::Module& module, int rank, int64_t micro_batch) {
               return dynamic_cast<Odd&>(module).Loss(rank, micro_batch);
             },
             options);
  TESSERA_RETURN_IF_ERROR(report.status());
  return report->ToString();
}

TEST(AdaptiveClippingUnitsTest, LieOtherwiseInMemory) {
  for (const int world_size : {1, 2, 3}) {
    for (const char* stage : {"1", "3"}) {
      EXPECT_THAT(RunOnRanks(world_size, "VerifyOdd", stage),
                  Each(HasSubstr("the same bits")))
          << world_size << " " << stage;
    }
  }
}

// ---- the formula

// Computes timm's formula with libtorch in float64.
at::Tensor ByLibtorch(const at::Tensor& gradient, const at::Tensor& weights,
                      double clipping, double eps) {
  const auto norm = [](const at::Tensor& t) {
    std::vector<int64_t> dims;
    for (int64_t d = 1; d < t.dim(); ++d) dims.push_back(d);
    const at::Tensor wide = t.to(at::kDouble);
    return dims.empty() ? wide.norm() : wide.norm(2, dims, /*keepdim=*/true);
  };
  const at::Tensor most = norm(weights).clamp_min(eps) * clipping;
  const at::Tensor is = norm(gradient);
  const at::Tensor wide = gradient.to(at::kDouble);
  return at::where(is < most, wide, wide * (most / is.clamp_min(1e-6)));
}

// Factor and product are rounded to float32, by 2^-24 of each at most.
TEST(AdaptiveClippingFormulaTest, IsThatOfLibtorch) {
  torch::manual_seed(3);
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{7}, {5, 67}, {6, 3, 3, 3}}) {
    const at::Tensor weights = torch::randn(sizes);
    at::Tensor gradient = torch::randn(sizes);
    gradient.select(0, 1).mul_(1e-3);
    weights.select(0, 0).mul_(1e-6);
    PlacedGradient placed;
    placed.gradient = gradient;
    placed.strides = gradient.strides().vec();
    const at::Tensor ours = OracleAdaptivelyClipped(
        placed, weights, sizes.size() > 1, /*divisor=*/1, kClipping, 1e-3);
    const at::Tensor plain = ByLibtorch(gradient, weights, kClipping, 1e-3);
    const at::Tensor difference = (ours.to(at::kDouble) - plain).abs();
    EXPECT_TRUE((difference <= 0x1.01p-23 * plain.abs()).all().item<bool>())
        << difference.max().item<double>();
    EXPECT_FALSE(ours.equal(gradient));
  }
}

// ---- what is refused

// args: a clipping, "strides", or what rank 1 has otherwise.
TESSERA_RANK_FUNCTION(RefuseAdaptive) {
  TrainingSpec spec;
  EngineOptions options;
  options.communicator = world.communicator();
  ParameterGroup group;
  group.name = "biases";
  group.parameters = {"*bias"};
  group.adaptive_gradient_clipping = args == "negative" ? -1 : 0.5;
  if (args == "differs") {
    group.adaptive_gradient_clipping = 0.5 + world.rank();
  }
  options.param_groups = {group};
  return Engine::Create(BuildModel("Mlp", world.rank()), ConfigOf(spec),
                        options)
      .status()
      .ToString();
}

TEST(AdaptiveClippingErrorTest, GroupsOfAProgram) {
  EXPECT_THAT(RunOnRanks(2, "RefuseAdaptive", "differs"),
              Each(AllOf(HasSubstr("INVALID_ARGUMENT"),
                         HasSubstr("adaptive_gradient_clipping 1.5"))));
  EXPECT_THAT(RunOnRanks(2, "RefuseAdaptive", "negative"),
              Each(HasSubstr("adaptive_gradient_clipping: expected a number of "
                             "at least 0, got -1")));
  EXPECT_THAT(RunOnRanks(2, "RefuseAdaptive", "good"), Each("OK"));
}

}  // namespace
}  // namespace tessera
