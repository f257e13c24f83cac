// Tests the optimizer section.
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "config/config.h"
#include "config/config_test_util.h"
#include "config/config_text.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::EndsWith;
using ::testing::HasSubstr;

TEST(Optimizer, AbsentStaysAbsent) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ParseConfig(Json("\"train_batch_size\": 1"), "f.json", 1));
  EXPECT_FALSE(config.has_optimizer());
}

TEST(Optimizer, DefaultsAreWrittenOut) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ParseConfig(OptimizerJson("{\"type\": \"adamw\"}"), "f.json", 1));
  EXPECT_EQ(config.optimizer().ShortDebugString(),
            "type: \"AdamW\" params { lr: 0.001 betas: 0.9 betas: 0.999 "
            "eps: 1e-08 weight_decay: 0 adam_w_mode: true bias_correction: "
            "true amsgrad: false state_dtype: \"fp32\" ema_decay: 0 maximize: "
            "false } "
            "no_decay: \"off\"");
}

TEST(Optimizer, TypeInAnyCase) {
  for (const char* type : {"Adam", "adam", "ADAM", "AdamW", "adamw", "ADAMW"}) {
    EXPECT_EQ(
        FaultOf(OptimizerJson(absl::StrCat("{\"type\": \"", type, "\"}"))),
        "OK")
        << type;
  }
  // Others are known, and refused where they would have to run.
  for (const char* type : {"ASGD", "zerooneadam", "NAdam"}) {
    const std::string json =
        OptimizerJson(absl::StrCat("{\"type\": \"", type, "\"}"));
    TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config config,
                                 ParseConfig(json, "f.json", 1));
    EXPECT_THAT(CheckRunnable(config),
                StatusIs(StatusCode::kUnimplemented,
                         absl::StrCat("not available in this version: "
                                      "optimizer.type: ",
                                      config.optimizer().type(),
                                      ": there is Adam, AdamW, SGD, Adagrad, "
                                      "RMSprop, Lion, Lamb, Muon, Adafactor, "
                                      "AdamWScheduleFree or Custom")));
  }
  EXPECT_EQ(FaultOf(OptimizerJson("{\"type\": \"AdanW\"}")),
            "optimizer.type: expected Adam, AdamW, or another optimizer of "
            "DeepSpeed or torch.optim, got 'AdanW', did you mean 'AdamW'?");
  EXPECT_EQ(FaultOf(OptimizerJson("{\"params\": {\"lr\": 1}}")),
            "optimizer.type: missing: expected Adam, AdamW or another");
}

TEST(Optimizer, ParamsOfOthersAreNoneOfAdams) {
  EXPECT_EQ(FaultOf(ParamsJson("\"momentum\": 0.9")),
            "optimizer.params.momentum: 'Adam' has no such parameter");
  EXPECT_EQ(FaultOf(OptimizerJson("{\"type\": \"SGD\", \"params\": "
                                  "{\"momentum\": 0.9}}")),
            "OK");
  EXPECT_EQ(FaultOf(ParamsJson("\"max_grad_norm\": 1")),
            "optimizer.params.max_grad_norm: refused: the norm is clipped "
            "before the optimizer: use gradient_clipping");
}

TEST(Optimizer, ParamsHaveRanges) {
  const std::pair<const char*, const char*> cases[] = {
      {"\"lr\": 0", "OK"},
      {"\"lr\": -1e-3",
       "optimizer.params.lr: expected a finite number of at least 0, got "
       "-0.001"},
      {"\"weight_decay\": 0.1", "OK"},
      {"\"weight_decay\": -1",
       "optimizer.params.weight_decay: expected a finite number of at least "
       "0, got -1"},
      {"\"eps\": 1e-12", "OK"},
      {"\"eps\": 0",
       "optimizer.params.eps: expected a finite number above 0, got 0"},
      {"\"betas\": [0, 0.5]", "OK"},
      {"\"betas\": [0.9, 1]",
       "optimizer.params.betas[1]: expected at least 0 and less than 1, got "
       "1"},
      {"\"betas\": [-0.1, 0.5]",
       "optimizer.params.betas[0]: expected at least 0 and less than 1, got "
       "-0.1"},
      {"\"betas\": [0.9]",
       "optimizer.params.betas: expected two numbers, got 1"},
      {"\"betas\": [0.9, 0.9, 0.9]",
       "optimizer.params.betas: expected two numbers, got 3"},
      {"\"adam_w_mode\": false", "OK"},
      {"\"adam_w_mode\": false, \"weight_decay\": 0.0", "OK"},
      {"\"adam_w_mode\": true, \"weight_decay\": 0.1", "OK"},
  };
  for (const auto& [params, fault] : cases) {
    EXPECT_EQ(FaultOf(ParamsJson(params)), fault) << params;
  }
}

TEST(Optimizer, EachHasItsOwnDefaults) {
  const std::pair<const char*, const char*> cases[] = {
      {"SGD",
       "lr: 0.001 weight_decay: 0 state_dtype: \"fp32\" ema_decay: 0 momentum: "
       "0 "
       "dampening: 0 nesterov: false maximize: false"},
      {"Adagrad",
       "lr: 0.01 eps: 1e-10 weight_decay: 0 state_dtype: \"fp32\" ema_decay: 0 "
       "lr_decay: 0 "
       "initial_accumulator_value: 0 maximize: false"},
      {"RMSprop",
       "lr: 0.01 eps: 1e-08 weight_decay: 0 state_dtype: \"fp32\" ema_decay: 0 "
       "momentum: 0 "
       "alpha: 0.99 centered: false maximize: false"},
      {"lion",
       "lr: 0.001 betas: 0.9 betas: 0.99 weight_decay: 0 state_dtype: "
       "\"fp32\" ema_decay: 0 maximize: false"},
      {"adamwschedulefree",
       "lr: 0.0025 betas: 0.9 betas: 0.999 eps: 1e-08 weight_decay: 0 "
       "state_dtype: \"fp32\" ema_decay: 0 r: 0 weight_lr_power: 2 maximize: "
       "false"},
      {"Adafactor",
       "lr: 0.01 weight_decay: 0 state_dtype: \"fp32\" ema_decay: 0 maximize: "
       "false eps2: 0.001 beta2_decay: -0.8 d: 1"},
  };
  for (const auto& [type, params] : cases) {
    const std::string json =
        OptimizerJson(absl::StrCat("{\"type\": \"", type, "\"}"));
    TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config config,
                                 ParseConfig(json, "f.json", 1));
    TESSERA_EXPECT_OK(CheckRunnable(config));
    EXPECT_EQ(config.optimizer().params().ShortDebugString(), params) << type;
  }
}

TEST(Optimizer, OptionsOfOthersAreRefused) {
  const auto fault = [](const char* type, const char* params) {
    return FaultOf(OptimizerJson(absl::StrCat(
        "{\"type\": \"", type, "\", \"params\": {", params, "}}")));
  };
  EXPECT_EQ(fault("SGD", "\"eps\": 1e-8"),
            "optimizer.params.eps: 'SGD' has no such parameter");
  EXPECT_EQ(fault("SGD", "\"nesterov\": true"),
            "optimizer.params.nesterov: expected a momentum above 0 and no "
            "dampening with it");
  EXPECT_EQ(fault("SGD", "\"nesterov\": true, \"momentum\": 0.9"), "OK");
  EXPECT_EQ(fault("Lion", "\"amsgrad\": true"),
            "optimizer.params.amsgrad: 'Lion' has no such parameter");
  EXPECT_EQ(fault("Adam", "\"state_dtype\": \"bf16\""), "OK");
  EXPECT_EQ(fault("SGD", "\"state_dtype\": \"8bit\""), "OK");
  EXPECT_EQ(
      fault("Adam", "\"state_dtype\": \"fp8\""),
      "optimizer.params.state_dtype: expected fp32, bf16 or 8bit, got 'fp8'");
}

TEST(Optimizer, AScheduleFreeOneIsPlain) {
  const auto fault = [](absl::string_view params, absl::string_view more = "") {
    return FaultOf(OptimizerJson(
        absl::StrCat("{\"type\": \"AdamWScheduleFree\", \"params\": {", params,
                     "}", more, "}")));
  };
  EXPECT_EQ(fault("\"r\": 0.5, \"weight_lr_power\": 0"), "OK");
  EXPECT_EQ(fault("\"r\": -1"),
            "optimizer.params.r: expected at least 0 and less than 16, got -1");
  EXPECT_EQ(fault("\"state_dtype\": \"bf16\""),
            "optimizer.params.state_dtype: expected fp32 with "
            "AdamWScheduleFree, whose state z is as good as a master, got "
            "bf16");
  EXPECT_EQ(fault("\"ema_decay\": 0.9"),
            "optimizer.params.ema_decay: expected 0 with AdamWScheduleFree, "
            "which has an average of its own");
  EXPECT_EQ(fault("\"betas\": [0, 0.9]"),
            "optimizer.params.betas[0]: expected above 0 with "
            "AdamWScheduleFree: without it the average cannot be found");
  EXPECT_EQ(fault("\"lr\": 1",
                  ", \"param_groups\": [{\"parameters\": \"*\", \"params\": "
                  "{\"betas\": [0, 0.9]}}]"),
            "optimizer.param_groups[0].params.betas[0]: expected above 0 with "
            "AdamWScheduleFree: without it the average cannot be found");
  EXPECT_EQ(fault("\"amsgrad\": true"),
            "optimizer.params.amsgrad: 'AdamWScheduleFree' has no such "
            "parameter");
  EXPECT_EQ(FaultOf(ParamsJson("\"r\": 1")),
            "optimizer.params.r: 'Adam' has no such parameter");
}

TEST(Optimizer, AProgramsOwnIsGivenWhatOthersHave) {
  const auto fault = [](const char* params) {
    return FaultOf(OptimizerJson(
        absl::StrCat("{\"type\": \"custom\", \"params\": {", params, "}}")));
  };
  EXPECT_EQ(fault(""), "OK");
  EXPECT_EQ(fault("\"betas\": [0.5, 0.9], \"momentum\": 0.9, \"alpha\": 0.5, "
                  "\"eps\": 1e-6, \"ema_decay\": 0.9"),
            "OK");
  EXPECT_EQ(fault("\"nesterov\": true"), "OK");
  EXPECT_EQ(fault("\"state_dtype\": \"bf16\""),
            "optimizer.params.state_dtype: expected fp32, of a program's own "
            "optimizer, got bf16");
  EXPECT_EQ(fault("\"ns_steps\": 3"),
            "optimizer.params.ns_steps: 'Custom' has no such parameter");
}

TEST(Optimizer, AdafactorsParams) {
  const std::pair<const char*, const char*> cases[] = {
      {"\"eps\": 1e-30, \"eps2\": 0, \"beta2_decay\": -1, \"d\": 2", "OK"},
      {"\"betas\": [0.9, 0.9]",
       "optimizer.params.betas: 'Adafactor' has no such parameter"},
      {"\"d\": 0.5",
       "optimizer.params.d: expected a finite number of at least 1, got 0.5"},
      {"\"beta2_decay\": 0.8",
       "optimizer.params.beta2_decay: expected a finite number less than 0, "
       "got "
       "0.8"},
      {"\"eps2\": -1",
       "optimizer.params.eps2: expected a finite number of at least 0, got -1"},
      {"\"state_dtype\": \"8bit\"",
       "optimizer.params.state_dtype: expected fp32 with Adafactor, whose "
       "states are few, got 8bit"}};
  for (const auto& [params, fault] : cases) {
    EXPECT_EQ(FaultOf(OptimizerJson(absl::StrCat(
                  "{\"type\": \"Adafactor\", \"params\": {", params, "}}"))),
              fault);
  }
  EXPECT_EQ(FaultOf(ParamsJson("\"d\": 2")),
            "optimizer.params.d: 'Adam' has no such parameter");
}

TEST(Optimizer, ExactBitsAreOfAdamWAlone) {
  const auto fault = [](const char* optimizer,
                        const char* keys = "\"libtorch_exact\": true") {
    return FaultOf(absl::StrCat("{\"train_batch_size\": 1, \"precision\": {",
                                keys, "}, \"optimizer\": ", optimizer, "}"));
  };
  EXPECT_EQ(fault("{\"type\": \"AdamW\"}"), "OK");
  EXPECT_THAT(fault("{\"type\": \"SGD\"}"),
              HasSubstr("precision.libtorch_exact: expected AdamW"));
  EXPECT_THAT(fault("{\"type\": \"AdamW\", \"params\": {\"amsgrad\": true}}"),
              HasSubstr("precision.libtorch_exact: expected AdamW"));
  const char* const fused = "\"libtorch_fused\": true";
  EXPECT_EQ(
      fault("{\"type\": \"AdamW\", \"params\": {\"amsgrad\": true}}", fused),
      "OK");
  for (const char* optimizer :
       {"{\"type\": \"SGD\"}", "{\"type\": \"Muon\"}",
        "{\"type\": \"AdamW\", \"params\": {\"bias_correction\": false}}",
        "{\"type\": \"AdamW\", \"params\": {\"state_dtype\": \"8bit\"}}"}) {
    EXPECT_THAT(fault(optimizer, fused),
                HasSubstr("precision.libtorch_fused: expected AdamW"))
        << optimizer;
  }
  EXPECT_THAT(fault("{\"type\": \"AdamW\"}",
                    "\"libtorch_fused\": true, \"libtorch_exact\": true"),
              HasSubstr("precision.libtorch_fused: expected this or "));
}

// ---- groups

std::string GroupsJson(absl::string_view groups) {
  return OptimizerJson(
      absl::StrCat("{\"type\": \"SGD\", \"params\": {\"momentum\": 0.9}, "
                   "\"param_groups\": [",
                   groups, "]}"));
}

// Letters that changed places cost one, and what does not run comes last.
TEST(Optimizer, MisspeltNamesAreSentToWhatRuns) {
  const std::pair<const char*, const char*> cases[] = {
      {"AdmaW", "AdamW"},     {"Aadm", "Adam"},      {"LAMBB", "Lamb"},
      {"Muno", "Muon"},       {"AdaMaxx", "Adamax"}, {"RMSporp", "RMSprop"},
      {"Adagard", "Adagrad"}, {"SDG", "SGD"},        {"Rpropp", "Rprop"},
      {"Adamm", "Adam"},      {"Adamx", "Adam"},     {"NAdamm", "Adam"},
      {"Adamxa", "Adam"}};
  for (const auto& [type, meant] : cases) {
    EXPECT_THAT(
        FaultOf(OptimizerJson(absl::StrCat("{\"type\": \"", type, "\"}"))),
        EndsWith(
            absl::StrCat("got '", type, "', did you mean '", meant, "'?")));
  }
  EXPECT_THAT(FaultOf(OptimizerJson("{\"type\": \"adam\"}")), "OK");
  EXPECT_THAT(FaultOf(Json("\"train_batch_size\": 1, \"scheduler\": {\"type\": "
                           "\"StpeLR\", \"params\": {\"step_size\": 1}}")),
              EndsWith("did you mean 'StepLR'?"));
  EXPECT_EQ(FaultOf(Json("\"train_batch_size\": 1, \"zero_optimization\": "
                         "{\"satge\": 1}")),
            "zero_optimization.satge: unknown key, did you mean 'stage'?");
  EXPECT_EQ(FaultOf(Json("\"train_batch_size\": 1, \"sharding\": "
                         "{\"deterministic\": \"atuo\"}")),
            "sharding.deterministic: expected auto, on or off, got 'atuo', did "
            "you mean 'auto'?");
}

// A double can hold these and a float32 cannot: a step would divide by 0, or do
// nothing.
TEST(Optimizer, NumbersAreThoseOfFloat32) {
  EXPECT_EQ(FaultOf(ParamsJson("\"eps\": 1e-50")),
            "optimizer.params.eps: expected a number that float32 holds, got "
            "1e-50, which is 0 there");
  EXPECT_EQ(FaultOf(ParamsJson("\"lr\": 1e39")),
            "optimizer.params.lr: expected a number that float32 holds, got "
            "1e+39, which is infinite there");
  EXPECT_EQ(FaultOf(Json("\"train_batch_size\": 1, \"fp16\": "
                         "{\"loss_scale\": 1e-60}")),
            "fp16.loss_scale: expected a number that float32 holds, got 1e-60, "
            "which is 0 there");
  EXPECT_EQ(FaultOf(ParamsJson("\"eps\": 1e-45, \"lr\": 3e38")), "OK");
  EXPECT_EQ(FaultOf(ParamsJson("\"weight_decay\": 0, \"lr\": -0.0")), "OK");
}

TEST(ParamGroups, AreReadAndNamed) {
  const std::string json = GroupsJson(
      "{\"parameters\": [\"a.*\", \"b\"], \"params\": {\"lr\": 0.5}}, "
      "{\"name\": \"norms\", \"modules\": \"LayerNorm\", \"frozen\": true, "
      "\"gradient_clipping\": 0.5}");
  TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config config,
                               ParseConfig(json, "f.json", 1));
  ASSERT_EQ(config.optimizer().param_groups_size(), 2);
  EXPECT_EQ(config.optimizer().param_groups(0).ShortDebugString(),
            "name: \"group 1\" parameters: \"a.*\" parameters: \"b\" params { "
            "lr: 0.5 }");
  EXPECT_EQ(config.optimizer().param_groups(1).ShortDebugString(),
            "name: \"norms\" modules: \"LayerNorm\" frozen: true "
            "gradient_clipping: 0.5");
  // The result is written to a file again, of both kinds.
  for (const auto& [text, file] :
       {std::pair(ConfigToJson(config), "f.json"),
        std::pair(ConfigToText(config, config), "f.textproto")}) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config again,
                                 ParseConfig(text, file, 1));
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(again.optimizer().param_groups(i).DebugString(),
                config.optimizer().param_groups(i).DebugString())
          << file;
    }
  }
}

TEST(ParamGroups, SayWhatIsWrongWithWhich) {
  const std::pair<const char*, const char*> cases[] = {
      {"{}",
       "optimizer.param_groups[0]: expected patterns of parameters, or classes "
       "of modules"},
      {"{\"parameters\": \"*\", \"params\": {\"lr\": -1}}",
       "optimizer.param_groups[0].params.lr: expected a finite number of at "
       "least 0, got -1"},
      {"{\"parameters\": \"*\", \"gradient_clipping\": -1}",
       "optimizer.param_groups[0].gradient_clipping: expected a finite number "
       "of at least 0, got -1"},
      {"{\"parameters\": \"*\", \"adaptive_gradient_clipping\": -1}",
       "optimizer.param_groups[0].adaptive_gradient_clipping: expected a "
       "finite "
       "number of at least 0, got -1"},
      {"{\"parameters\": \"*\", \"params\": {\"eps\": 1e-3}}",
       "optimizer.param_groups[0].params.eps: 'SGD' has no such parameter"},
      {"{\"parameters\": \"*\", \"params\": {\"momentum\": 0}}",
       "optimizer.param_groups[0].params.momentum: expected 0 for all groups "
       "or for none: with a momentum there are other states"},
      {"{\"parameters\": \"*\", \"parms\": {}}",
       "optimizer.param_groups[0].parms: unknown key, did you mean 'params'?"},
      {"{\"name\": \"a\", \"parameters\": \"x\"}, "
       "{\"name\": \"a\", \"parameters\": \"y\"}",
       "optimizer.param_groups[1].name: there is another group 'a'"},
  };
  for (const auto& [groups, fault] : cases) {
    EXPECT_EQ(FaultOf(GroupsJson(groups)), fault) << groups;
  }
}

TEST(Optimizer, EmptyBetasAreNotTwoNumbers) {
  EXPECT_EQ(FaultOf(ParamsJson("\"betas\": []")),
            "optimizer.params.betas: expected two numbers, got 0");
}

}  // namespace
}  // namespace tessera
