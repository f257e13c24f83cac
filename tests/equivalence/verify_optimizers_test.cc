// Runs Verify on the user's own model, with each optimizer and with groups of
// parameters.
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "comm/world/world.h"
#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"
#include "tests/models/models.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training_spec.h"
#include "verify/verify.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

proto::Config ConfigWith(const std::string& optimizer) {
  TrainingSpec spec;
  spec.stage = 3;
  proto::Config config = ConfigOf(spec);
  config.clear_optimizer();
  TORCH_CHECK(google::protobuf::TextFormat::ParseFromString(
      optimizer, config.mutable_optimizer()));
  return config;
}

std::string VerifyMlp(const proto::Config& config, const World& world,
                      std::vector<ParameterGroup> groups = {}) {
  VerifyOptions options;
  options.engine.communicator = world.communicator();
  options.engine.param_groups = std::move(groups);
  const auto report =
      Verify([] { return MakeTestModel("Mlp"); }, config,
             [](torch::nn::Module& module, int rank, int64_t micro_batch) {
               return dynamic_cast<TestModel&>(module).Loss(rank, micro_batch);
             },
             options);
  return report.ok() ? report->ToString() : report.status().ToString();
}

// args: the optimizer.
TESSERA_RANK_FUNCTION(VerifyOptimizer) {
  return VerifyMlp(ConfigWith(std::string(args)), world);
}

void ExpectSame(const std::string& optimizer,
                const char* function = "VerifyOptimizer") {
  EXPECT_THAT(RunOnRanks(2, function, optimizer),
              Each(HasSubstr("values: the same bits")))
      << optimizer;
}

TEST(VerifyOptimizersTest, EachOfThem) {
  for (const char* optimizer :
       {"type: 'AdamW' params { amsgrad: true }",
        "type: 'Adam' params { adam_w_mode: false bias_correction: false }",
        "type: 'SGD' params { momentum: 0.9 nesterov: true maximize: true }",
        "type: 'Adagrad' params { lr_decay: 0.1 }",
        "type: 'Lamb' params { weight_decay: 0.1 }",
        "type: 'Muon' params { weight_decay: 0.1 } param_groups { name: 'up' "
        "parameters: '*.up.weight' use_muon: true params { momentum: 0.5 } }",
        "type: 'Adafactor' params { weight_decay: 0.1 eps2: 0.01 }",
        "type: 'RMSprop' params { centered: true momentum: 0.9 }",
        "type: 'AdamWScheduleFree' params { weight_decay: 0.1 r: 1 }",
        "type: 'Lion' params { weight_decay: 0.1 state_dtype: 'bf16' }"}) {
    ExpectSame(optimizer);
  }
}

TEST(VerifyOptimizersTest, GroupsOfTheConfiguration) {
  ExpectSame(
      "type: 'AdamW' params { weight_decay: 0.1 } no_decay: 'auto' "
      "param_groups { parameters: 'in.*' params { lr: 0.1 } } "
      "param_groups { name: 'still' modules: 'LayerNorm' frozen: true }");
}

TESSERA_RANK_FUNCTION(VerifyScheduled) {
  proto::Config config = ConfigWith(std::string(args));
  config.mutable_scheduler()->set_type("WarmupLR");
  config.mutable_scheduler()->mutable_params()->set_warmup_num_steps(4);
  return VerifyMlp(config, world);
}

TEST(VerifyOptimizersTest, Schedules) {
  ExpectSame(
      "type: 'SGD' params { momentum: 0.9 } param_groups { parameters: 'in.*' "
      "params { momentum: 0.5 } }",
      "VerifyScheduled");
  ExpectSame("type: 'AdamWScheduleFree' params { weight_decay: 0.1 }",
             "VerifyScheduled");
}

TESSERA_RANK_FUNCTION(VerifyScaled) {
  proto::Config config = ConfigWith(std::string(args));
  config.mutable_learning_rate_scaling()->set_rule("sqrt");
  config.mutable_learning_rate_scaling()->set_base_batch_size(11);
  ParameterGroup norms;
  norms.name = "norms";
  norms.modules = {"LayerNorm"};
  norms.options = {{"lr", 0.3}};
  return VerifyMlp(config, world, {norms});
}

TEST(VerifyOptimizersTest, RatesForABatch) {
  ExpectSame(
      "type: 'SGD' params { lr: 0.2 } param_groups { parameters: 'in.*' "
      "params { lr: 0.7 } }",
      "VerifyScaled");
}

ParameterGroup Biases() {
  ParameterGroup group;
  group.name = "biases";
  group.options = {{"lr", 0.1}, {"nesterov", 1}, {"momentum", 0.5}};
  return group;
}

// args: whether the program says the same of a parameter each time.
TESSERA_RANK_FUNCTION(VerifyProgram) {
  ParameterGroup group = Biases();
  std::vector<std::string> asked;
  group.claims = [&asked, same = args == "same"](const torch::nn::Module&,
                                                 absl::string_view name,
                                                 const at::Tensor& tensor) {
    const bool again = std::count(asked.begin(), asked.end(), name) > 0;
    asked.emplace_back(name);
    return tensor.dim() == 1 && (same || !again || name != "out.bias");
  };
  return VerifyMlp(ConfigWith("type: 'SGD' params { momentum: 0.9 } "
                              "param_groups { parameters: 'out.weight' "
                              "params { dampening: 0.5 } }"),
                   world, {group});
}

TEST(VerifyOptimizersTest, GroupsOfTheProgram) {
  EXPECT_THAT(RunOnRanks(2, "VerifyProgram", "same"),
              Each(HasSubstr("values: the same bits")));
}

// Then out.bias is of that group in the engine, and of none here.
TEST(VerifyOptimizersTest, AParameterOfAnotherGroupIsNamed) {
  EXPECT_THAT(
      RunOnRanks(2, "VerifyProgram", "other"),
      Each(AllOf(HasSubstr("step 0 of 3: master of parameter 'out.bias'"),
                 HasSubstr("after the step: element [0] is"))));
}

TEST(VerifyOptimizersTest, WhatIsUnknownIsNamed) {
  EXPECT_THAT(RunOnRanks(2, "VerifyOptimizer", "type: 'NAdam'"),
              Each(HasSubstr("does not know optimizer.type NAdam")));
}

}  // namespace
}  // namespace tessera
