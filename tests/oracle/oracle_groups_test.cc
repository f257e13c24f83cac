// Groups of parameters as the oracle reads them, against cases worked out by
// hand.
#include "verify/oracle_groups.h"

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/status_matchers.h"
#include "config/config.h"
#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"
#include "tests/models/models.h"
#include "verify/oracle.h"
#include "verify/oracle_options.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(OracleGroups, Patterns) {
  EXPECT_TRUE(FitsPattern("*", ""));
  EXPECT_TRUE(FitsPattern("a.b", "a.b"));
  EXPECT_FALSE(FitsPattern("a.b", "a.bc"));
  EXPECT_TRUE(FitsPattern("*.bias", "blocks.0.up.bias"));
  EXPECT_FALSE(FitsPattern("*.bias", "bias"));
  EXPECT_TRUE(FitsPattern("blocks.?.*", "blocks.1.up.weight"));
  EXPECT_FALSE(FitsPattern("blocks.?.*", "blocks.11.up.weight"));
  EXPECT_TRUE(FitsPattern("*a*b*", "xxaayybbz"));
  EXPECT_FALSE(FitsPattern("*a*b*", "xxbbyyaaz"));
}

TEST(OracleGroups, Classes) {
  EXPECT_TRUE(FitsClass("Linear", "torch::nn::LinearImpl"));
  EXPECT_TRUE(FitsClass("torch::nn::Linear", "torch::nn::LinearImpl"));
  EXPECT_TRUE(FitsClass("LinearImpl", "torch::nn::LinearImpl"));
  EXPECT_FALSE(FitsClass("nn::Linear", "torch::nn::LinearImpl"));
  EXPECT_FALSE(FitsClass("Line", "torch::nn::LinearImpl"));
  EXPECT_TRUE(FitsClass("List<b::C>", "a::(anonymous namespace)::List<b::C>"));
}

TEST(OracleGroups, OptionsByName) {
  OracleStepOptions o;
  EXPECT_TRUE(SetOracleOption("weight_decay", 0.5, &o));
  EXPECT_TRUE(SetOracleOption("nesterov", 1, &o));
  EXPECT_FALSE(SetOracleOption("nestorov", 1, &o));
  EXPECT_EQ(o.weight_decay, 0.5);
  EXPECT_TRUE(o.nesterov);
}

// `optimizer` is a proto::Optimizer as text.
absl::StatusOr<OracleOptions> Read(const std::string& optimizer) {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(
      optimizer, config.mutable_optimizer()));
  TESSERA_ASSIGN_OR_RETURN(const proto::Config resolved,
                           ResolveConfig(config, /*world_size=*/1));
  return OracleOptionsOf(resolved, /*world_size=*/1, /*stage=*/0);
}

// The names of the groups' parameters, of a model.
std::vector<std::vector<std::string>> MembersOf(const std::string& model,
                                                const OracleOptions& options) {
  const auto module = MakeTestModel(model);
  const auto group_of = OracleGroupsOf(*module, options.groups);
  std::vector<std::vector<std::string>> members(options.groups.size());
  for (const auto& p : module->named_parameters()) {
    const auto it = group_of.find(p.value().unsafeGetTensorImpl());
    if (it != group_of.end()) members[it->second].push_back(p.key());
  }
  return members;
}

TEST(OracleGroups, AreThoseOfTheConfiguration) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const OracleOptions o, Read(R"(
    type: "SGD" params { lr: 0.5 momentum: 0.9 weight_decay: 0.25 }
    param_groups { parameters: "encoder.*" params { lr: 0.125 } }
    param_groups {
      name: "still" parameters: "middle.weight" frozen: true
      params { momentum: 0.5 weight_decay: 0 }
    }
    no_decay: "auto")"));
  ASSERT_EQ(o.groups.size(), 3u);
  EXPECT_EQ(o.groups[0].name, "group 1");
  EXPECT_EQ(o.groups[0].options.lr, 0.125);
  EXPECT_EQ(o.groups[0].options.momentum, 0.9);
  EXPECT_EQ(o.groups[0].options.weight_decay, 0.25);
  EXPECT_FALSE(o.groups[0].frozen);
  EXPECT_EQ(o.groups[1].options.lr, 0.5);
  EXPECT_EQ(o.groups[1].options.momentum, 0.5);
  EXPECT_EQ(o.groups[1].options.weight_decay, 0);
  EXPECT_TRUE(o.groups[1].frozen);
  EXPECT_EQ(o.groups[2].name, "no_decay");
  EXPECT_EQ(o.groups[2].options.weight_decay, 0);
  EXPECT_EQ(o.groups[2].options.momentum, 0.9);
  // The decoder's weight is the encoder's; a bias of a group stays in it.
  EXPECT_THAT(MembersOf("Tied", o),
              ElementsAre(ElementsAre("encoder.weight", "encoder.bias",
                                      "decoder.weight"),
                          ElementsAre("middle.weight"),
                          ElementsAre("middle.bias", "decoder.bias")));
}

TEST(OracleGroups, ByClassAndWithoutDecay) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const OracleOptions o,
      Read("type: 'Adam' params { adam_w_mode: false state_dtype: 'bf16' } "
           "param_groups { modules: 'Embedding' } no_decay: 'auto'"));
  EXPECT_EQ(o.optimizer.algorithm, "Adam");
  EXPECT_TRUE(o.optimizer.bf16_states);
  const auto members = MembersOf("Gpt", o);
  EXPECT_THAT(members[0], ElementsAre("tokens.weight"));
  EXPECT_THAT(members[1], ::testing::IsSupersetOf({"norm.weight", "norm.bias",
                                                   "blocks.1.qkv.bias"}));
  EXPECT_THAT(members[1],
              ::testing::Not(::testing::Contains("blocks.1.qkv.weight")));
}

TEST(OracleGroups, WhatIsUnknownIsNamed) {
  EXPECT_THAT(Read("type: 'NAdam'"),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("does not know optimizer.type NAdam")));
}

// ---- steps

struct TwoImpl : torch::nn::Module {
  TwoImpl() {
    for (const char* name : {"a", "b", "c"}) {
      register_parameter(name, torch::zeros({2}));
    }
  }
};

double ValueOf(const Oracle& oracle, const char* name) {
  return oracle.parameter(name)[0].item<double>();
}

TEST(OracleGroups, AreSteppedWithTheirOptions) {
  OracleOptions options;
  options.world_size = 2;
  options.optimizer.algorithm = "SGD";
  options.optimizer.lr = 1;
  OracleGroup fast, still;
  fast.name = "fast";
  fast.options = still.options = options.optimizer;
  fast.options.lr = 4;
  fast.parameters = {"b"};
  still.name = "still";
  still.parameters = {"c"};
  still.frozen = true;
  options.groups = {fast, still};
  Oracle oracle([] { return std::make_shared<TwoImpl>(); }, options);
  const auto loss = [](torch::nn::Module& module, int, int64_t) {
    at::Tensor sum = torch::zeros({});
    for (const at::Tensor& p : module.parameters()) sum = sum + p.sum();
    return sum;
  };
  oracle.TrainStep(loss);
  EXPECT_EQ(ValueOf(oracle, "a"), -1);
  EXPECT_EQ(ValueOf(oracle, "b"), -4);
  EXPECT_EQ(ValueOf(oracle, "c"), 0);
  EXPECT_FALSE(oracle.gradient("c").defined());
  oracle.SetLearningRate("fast", 0.5);
  oracle.SetLearningRate("default", 2);
  oracle.TrainStep(loss);
  EXPECT_EQ(ValueOf(oracle, "a"), -3);
  EXPECT_EQ(ValueOf(oracle, "b"), -4.5);
  EXPECT_THROW(oracle.SetLearningRate("slow", 1), c10::Error);
}

}  // namespace
}  // namespace tessera
