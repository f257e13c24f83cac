// Clipping by value, and of groups of parameters by norms of their own: the
// oracle's bits at every stage, whatever the ranks; what is refused.
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// Clips most elements of these models, and some of their gradients.
constexpr double kValue = 0.01;
// The groups of an Mlp: biases are always clipped, norms never, and the rest is
// clipped together.
constexpr char kGroups[] =
    "type:'AdamW',params{lr:0.01,weight_decay:0.1},"
    "param_groups{name:'biases',parameters:'*.bias',gradient_clipping:0.01},"
    "param_groups{name:'first',parameters:'blocks.0.*.weight',"
    "gradient_clipping:0},"
    "param_groups{name:'second',parameters:'blocks.1.*.weight'}";

class ClippingTest : public ::testing::TestWithParam<int> {
 protected:
  ClippingTest() {
    spec_.stage = GetParam();
    spec_.gradients = true;
    spec_.outcomes = true;
  }
  void ExpectOracle() {
    for (const int world_size : {1, 2}) {
      ExpectEqualsOracle(spec_, world_size);
    }
  }
  TrainingSpec spec_;
};

TEST_P(ClippingTest, ValuesOfModels) {
  spec_.clipping_value = kValue;
  spec_.clipping = 0.05;
  for (const char* model :
       {"Mlp", "Gpt", "SharedStorage", "Tied", "Complex", "Frozen"}) {
    spec_.model = model;
    ExpectOracle();
  }
}

TEST_P(ClippingTest, ValuesAlone) {
  spec_.clipping_value = kValue;
  spec_.outcomes = false;
  spec_.accumulation = 2;
  ExpectOracle();
  spec_.accumulation_mode = "local";
  spec_.weights = true;
  ExpectOracle();
}

// Gradients have 16 bits, and a scale, by which they are divided last.
TEST_P(ClippingTest, ValuesOfScaledGradients) {
  spec_.clipping_value = kValue;
  for (const char* dtype : {"bf16", "fp16"}) {
    spec_.dtype = dtype;
    ExpectOracle();
  }
}

// An infinite gradient makes the step be skipped, and is not clipped away
// before.
TEST_P(ClippingTest, OverflowsAreNotClippedAway) {
  spec_.clipping_value = kValue;
  spec_.model = "Overflows";
  spec_.gradients = false;  // of NaNs there are many
  spec_.steps = 9;
  spec_.dtype = "fp16";
  spec_.initial_scale_power = 8;
  spec_.loss_scale_window = 2;
  spec_.hysteresis = 1;
  ExpectOracle();
  spec_.dtype = "bf16";
  ExpectOracle();
}

TEST_P(ClippingTest, Groups) {
  spec_.optimizer = kGroups;
  spec_.clipping = 0.1;
  for (const char* dtype : {"fp32", "bf16", "fp16"}) {
    spec_.dtype = dtype;
    ExpectOracle();
  }
  spec_.clipping_norm = std::numeric_limits<double>::infinity();
  spec_.clipping_value = kValue;
  ExpectOracle();
}

TEST_P(ClippingTest, GroupsAlone) {
  spec_.optimizer = kGroups;
  spec_.accumulation = 2;
  spec_.weights = true;
  ExpectOracle();
}

// Shard groups have norms of their own, which must be the same.
TEST_P(ClippingTest, OfReplicas) {
  if (spec_.stage == 0) GTEST_SKIP() << "there are no shard groups";
  spec_.shard_group = 1;
  spec_.optimizer = kGroups;
  spec_.clipping = 0.1;
  spec_.clipping_value = kValue;
  ExpectEqualsOracle(spec_, 2);
}

INSTANTIATE_TEST_SUITE_P(Stages, ClippingTest, ::testing::Range(0, 4),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

// Gradients and states on a disk; a unit that were stepped with its gradient as
// it came would have other bits.
void ExpectOracleOffloaded(TrainingSpec spec) {
  spec.stage = 3;
  spec.states_on_disk = 1;
  for (const bool gradients : {false, true}) {
    spec.gradients_on_disk = gradients;
    ExpectEqualsOracle(spec, 2);
  }
}

TEST(ClippingOffloadTest, ValuesAreTheSame) {
  TrainingSpec spec;
  spec.clipping_value = kValue;
  ExpectOracleOffloaded(spec);
}

TEST(ClippingOffloadTest, GroupsAreTheSame) {
  TrainingSpec spec;
  spec.optimizer = kGroups;
  ExpectOracleOffloaded(spec);
}

// ---- reports

// args: a stage. The norms of the step: of the rest, and of each group.
TESSERA_RANK_FUNCTION(NormsOfGroups) {
  TrainingSpec spec;
  TESSERA_CHECK(absl::SimpleAtoi(args, &spec.stage));
  spec.optimizer = kGroups;
  spec.clipping = 0.1;
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  const StepReport& report = t.engine->last_step();
  std::string text =
      absl::StrFormat("%.3g %.3g", report.grad_norm, report.clipped_norm);
  for (const StepReport::Group& group : report.groups) {
    absl::StrAppendFormat(&text, "; %s %d %.3g", group.name,
                          std::isnan(group.grad_norm) ? 0 : 1,
                          group.clipped_norm);
    const bool clipped = group.clipped_norm < group.grad_norm;
    absl::StrAppend(&text, clipped ? " clipped" : "");
  }
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return text;
}

TEST(ClippingReportTest, HasTheNormsOfGroups) {
  const std::vector<std::string> first = RunOnRanks(2, "NormsOfGroups", "0");
  EXPECT_THAT(
      first, Each(AllOf(HasSubstr(" 0.1; default 0 nan"),
                        HasSubstr("; biases 1 0.01 clipped"),
                        HasSubstr("; first 1 "), HasSubstr("; second 0 nan"))));
  for (const char* stage : {"1", "2", "3"}) {
    EXPECT_EQ(RunOnRanks(2, "NormsOfGroups", stage), first) << stage;
  }
}

// ---- what is refused

// args: what of rank 1's.
TESSERA_RANK_FUNCTION(GroupOfTheProgram) {
  TrainingSpec spec;
  EngineOptions options;
  options.communicator = world.communicator();
  ParameterGroup group;
  group.name = "heads";
  group.parameters = {"*.bias"};
  double clipping = 0.5;
  TESSERA_CHECK(world.rank() == 0 || absl::SimpleAtod(args, &clipping));
  group.gradient_clipping = clipping;
  options.param_groups = {group};
  return Engine::Create(BuildModel(spec.model, world.rank()), ConfigOf(spec),
                        options)
      .status()
      .ToString();
}

TEST(ClippingErrorTest, GroupsOfAProgram) {
  EXPECT_THAT(RunOnRanks(2, "GroupOfTheProgram", "0.25"),
              Each(AllOf(HasSubstr("INVALID_ARGUMENT"),
                         HasSubstr("gradient_clipping 0.25"))));
  EXPECT_THAT(RunOnRanks(2, "GroupOfTheProgram", "-1"),
              Each(HasSubstr("gradient_clipping: expected a number of at least "
                             "0, got -1")));
  EXPECT_THAT(RunOnRanks(2, "GroupOfTheProgram", "0.5"), Each("OK"));
}

}  // namespace
}  // namespace tessera
