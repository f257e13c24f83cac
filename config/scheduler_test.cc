// The sections scheduler and learning_rate_scaling: defaults, and one clear
// error for what is wrong.
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "config/config.h"
#include "config/config_test_util.h"
#include "config/config_text.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

std::string With(absl::string_view members) {
  return Json(absl::StrCat(
      "\"train_batch_size\": 8, \"optimizer\": {\"type\": \"Adam\"}, ",
      members));
}

proto::Config Parsed(absl::string_view members) {
  const absl::StatusOr<proto::Config> config =
      ParseConfig(With(members), "f.json", 1);
  TESSERA_EXPECT_OK(config.status());
  return config.value_or(proto::Config());
}

std::string SchedulerOf(absl::string_view type, absl::string_view params) {
  return absl::StrCat("\"scheduler\": {\"type\": \"", type, "\", \"params\": {",
                      params, "}}");
}

std::string ParamsOf(absl::string_view type, absl::string_view params) {
  return Parsed(SchedulerOf(type, params))
      .scheduler()
      .params()
      .ShortDebugString();
}

TEST(SchedulerConfigTest, DeepSpeedsHaveTheirDefaults) {
  EXPECT_EQ(ParamsOf("WarmupLR", ""),
            "warmup_min_lr: 0 warmup_max_lr: 0.001 warmup_num_steps: 1000 "
            "warmup_type: \"log\" last_batch_iteration: -1");
  EXPECT_EQ(ParamsOf("WarmupDecayLR", "\"total_num_steps\": 9"),
            "warmup_min_lr: 0 warmup_max_lr: 0.001 warmup_num_steps: 1000 "
            "warmup_type: \"log\" total_num_steps: 9 last_batch_iteration: -1");
  EXPECT_EQ(ParamsOf("WarmupCosineLR", "\"total_num_steps\": 9"),
            "warmup_num_steps: 1000 warmup_type: \"log\" total_num_steps: 9 "
            "warmup_min_ratio: 0 cos_min_ratio: 0.0001 last_batch_iteration: "
            "-1");
  EXPECT_EQ(ParamsOf("OneCycle",
                     "\"cycle_min_lr\": 0.1, \"cycle_max_lr\": 1, "
                     "\"cycle_second_step_size\": null"),
            "last_batch_iteration: -1 cycle_min_lr: 0.1 cycle_max_lr: 1 "
            "decay_lr_rate: 0 cycle_first_step_size: 2000 "
            "cycle_second_step_size: 2000 cycle_first_stair_count: 0 "
            "cycle_second_stair_count: 0 decay_step_size: 0 cycle_momentum: "
            "true cycle_min_mom: 0.8 cycle_max_mom: 0.9 decay_mom_rate: 0");
  EXPECT_EQ(ParamsOf("LRRangeTest", ""),
            "last_batch_iteration: -1 lr_range_test_min_lr: 0.001 "
            "lr_range_test_step_size: 2000 lr_range_test_step_rate: 1 "
            "lr_range_test_staircase: false");
}

TEST(SchedulerConfigTest, TorchsHaveTheirDefaults) {
  const std::pair<std::pair<const char*, const char*>, const char*> cases[] = {
      {{"StepLR", "\"step_size\": 3"}, "step_size: 3 gamma: 0.1"},
      {{"MultiStepLR", "\"milestones\": [1, 1, 2]"},
       "gamma: 0.1 milestones: 1 milestones: 1 milestones: 2"},
      {{"ConstantLR", ""}, "factor: 0.33333333333333331 total_iters: 5"},
      {{"LinearLR", ""},
       "start_factor: 0.33333333333333331 end_factor: 1 total_iters: 5"},
      {{"ExponentialLR", "\"gamma\": 0.5"}, "gamma: 0.5"},
      {{"PolynomialLR", ""}, "total_iters: 5 power: 1"},
      {{"CosineAnnealingLR", "\"T_max\": 9"},
       "T_max: 9 eta_min: 0 after: \"rise\""},
      {{"CosineAnnealingWarmRestarts", "\"T_0\": 9"},
       "eta_min: 0 T_0: 9 T_mult: 1"},
      {{"OneCycleLR",
        "\"max_lr\": 1, \"epochs\": 3, \"steps_per_epoch\": 7, "
        "\"total_steps\": null"},
       "cycle_momentum: true max_lr: 1 total_steps: 21 epochs: 3 "
       "steps_per_epoch: 7 pct_start: 0.3 anneal_strategy: \"cos\" "
       "div_factor: 25 final_div_factor: 10000 three_phase: false "
       "base_momentum: 0.85 max_momentum: 0.95"},
      {{"CyclicLR", "\"base_lr\": 0, \"max_lr\": 1, \"step_size_up\": 4"},
       "cycle_momentum: true gamma: 1 mode: \"triangular\" base_lr: 0 max_lr: "
       "1 step_size_up: 4 step_size_down: 4 base_momentum: 0.8 max_momentum: "
       "0.9"},
      {{"ReduceLROnPlateau", ""},
       "factor: 0.1 patience: 10 threshold: 0.0001 threshold_mode: \"rel\" "
       "cooldown: 0 min_lr: 0 mode: \"min\" eps: 1e-08"},
  };
  for (const auto& [given, filled] : cases) {
    std::string text = ParamsOf(given.first, given.second);
    // All but DeepSpeed's and ReduceLROnPlateau have it.
    const std::string kFirst = "last_epoch: -1";
    const size_t at = text.find(kFirst);
    if (at != text.npos) {
      text = text.substr(0, at == 0 ? 0 : at - 1) +
             text.substr(at + kFirst.size());
    }
    EXPECT_EQ(text, filled) << given.first;
  }
  EXPECT_EQ(ParamsOf("WSD", "\"total_num_steps\": 9, \"decay_num_steps\": 9"),
            "warmup_num_steps: 0 total_num_steps: 9 warmup_min_ratio: 0 "
            "decay_num_steps: 9 decay_type: \"linear\" decay_min_ratio: 0");
}

TEST(SchedulerConfigTest, WrongParametersAreNamed) {
  const std::pair<std::string, const char*> cases[] = {
      {SchedulerOf("WarmupDecayLR", ""),
       "total_num_steps: missing: 'WarmupDecayLR' needs it"},
      {SchedulerOf("WarmupLR", "\"gamma\": 1"),
       "gamma: 'WarmupLR' has no such parameter"},
      {SchedulerOf("OneCycle",
                   "\"cycle_min_lr\": 1, \"cycle_max_lr\": 2, "
                   "\"cycle_first_step_size\": 0"),
       "cycle_first_step_size: expected at least 1, got 0"},
      {SchedulerOf("CosineAnnealingLR", "\"T_max\": -1"),
       "T_max: expected at least 1, got -1: write the optimizer steps of the "
       "run: epochs * batches of one / gradient_accumulation_steps"},
      {SchedulerOf("WarmupDecayLR", "\"total_num_steps\": -1"),
       "total_num_steps: expected at least 0, got -1: write the optimizer "
       "steps of the run: epochs * batches of one / "
       "gradient_accumulation_steps"},
      {SchedulerOf("WarmupLR", "\"warmup_num_steps\": -1"),
       "warmup_num_steps: expected at least 0, got -1: 0 is no warmup"},
      {SchedulerOf("CosineAnnealingLR", ""),
       "T_max: missing: 'CosineAnnealingLR' needs it"},
      {SchedulerOf("CosineAnnealingLR", "\"T_max\": 9, \"T_mult\": 2"),
       "T_mult: 'CosineAnnealingLR' has no such parameter"},
      {SchedulerOf("CosineAnnealingWarmRestarts", "\"T_0\": 4, \"T_mult\": 0"),
       "T_mult: expected at least 1, got 0"},
      {SchedulerOf("StepLR", "\"gamma\": 0.1"),
       "step_size: missing: 'StepLR' needs it"},
      {SchedulerOf("StepLR", "\"step_size\": 0"),
       "step_size: expected at least 1, got 0"},
      {SchedulerOf("StepLR", "\"step_size\": 3, \"last_epoch\": 4"),
       "last_epoch: expected -1, got 4: a run continues from its checkpoint"},
      {SchedulerOf("StepLR", "\"step_size\": 3, \"step_sise\": 4"),
       "step_sise: unknown key, did you mean 'step_size'?"},
      {SchedulerOf("MultiStepLR", ""),
       "milestones: missing: 'MultiStepLR' needs it"},
      {SchedulerOf("MultiStepLR", "\"milestones\": [30, 80, 50]"),
       "milestones: expected ascending steps, got 30, 80, 50"},
      {SchedulerOf("MultiStepLR", "\"milestones\": [-1, 5]"),
       "milestones[0]: expected at least 0, got -1"},
      {SchedulerOf("StepLR", "\"step_size\": 3, \"milestones\": [5]"),
       "milestones: 'StepLR' has no such parameter"},
      {SchedulerOf("ExponentialLR", ""),
       "gamma: missing: 'ExponentialLR' needs it"},
      {SchedulerOf("ConstantLR", "\"factor\": 1.5"),
       "factor: expected 0 to 1, got 1.5"},
      {SchedulerOf("ConstantLR", "\"factor\": 0"),
       "factor: expected above 0, got 0"},
      {SchedulerOf("LinearLR", "\"start_factor\": 0"),
       "start_factor: expected above 0 and at most 1, got 0"},
      {SchedulerOf("PolynomialLR", "\"total_iters\": 0"),
       "total_iters: expected at least 1, got 0"},
      {SchedulerOf("OneCycleLR", "\"max_lr\": 1, \"epochs\": 3"),
       "total_steps: missing: 'OneCycleLR' needs it, or epochs and "
       "steps_per_epoch"},
      {SchedulerOf("OneCycleLR",
                   "\"max_lr\": 1, \"epochs\": 3, \"steps_per_epoch\": 2, "
                   "\"total_steps\": 7"),
       "total_steps: expected epochs * steps_per_epoch = 6, got 7; leave it "
       "out, or them"},
      {SchedulerOf("OneCycleLR",
                   "\"max_lr\": 1, \"total_steps\": 4, \"pct_start\": "
                   "0.25"),
       "pct_start: times total_steps is 1, so that the rise has no steps; got "
       "0.25 of 4"},
      {SchedulerOf("OneCycleLR",
                   "\"max_lr\": 1, \"total_steps\": 4, \"pct_start\": 1.5"),
       "pct_start: expected 0 to 1, got 1.5"},
      {SchedulerOf("CyclicLR",
                   "\"base_lr\": 0, \"max_lr\": 1, \"mode\": \"min\""),
       "mode: expected triangular, triangular2 or exp_range, got 'min'"},
      {SchedulerOf("ReduceLROnPlateau", "\"mode\": \"exp_range\""),
       "mode: expected min or max, got 'exp_range'"},
      {SchedulerOf("ReduceLROnPlateau", "\"factor\": 1"),
       "factor: expected less than 1, got 1"},
      {SchedulerOf("WSD",
                   "\"total_num_steps\": 9, \"decay_num_steps\": 5, "
                   "\"warmup_num_steps\": 5"),
       "total_num_steps: expected at least warmup_num_steps + "
       "decay_num_steps, 5 + 5, got 9"},
      {SchedulerOf("WSD",
                   "\"total_num_steps\": 9, \"decay_num_steps\": 5, "
                   "\"warmup_min_ratio\": -1"),
       "warmup_min_ratio: expected 0 to 1, got -1"},
      {SchedulerOf("WSD", "\"total_num_steps\": 9"),
       "decay_num_steps: missing: 'WSD' needs it"},
  };
  for (const auto& [scheduler, fault] : cases) {
    EXPECT_EQ(FaultOf(With(scheduler)),
              absl::StrCat("scheduler.params.", fault));
  }
}

TEST(SchedulerConfigTest, WarmupsAreChecked) {
  const proto::Config config =
      Parsed("\"scheduler\": {\"warmup\": {\"num_steps\": 3}}");
  TESSERA_EXPECT_OK(CheckRunnable(config));
  EXPECT_EQ(config.scheduler().ShortDebugString(),
            "warmup { num_steps: 3 start_factor: 0.33333333333333331 shape: "
            "\"linear\" }");
  const std::pair<const char*, const char*> cases[] = {
      {"\"warmup\": {\"num_steps\": -3}",
       "scheduler.warmup.num_steps: expected at least 0, got -3"},
      {"\"warmup\": {\"num_steps\": 3, \"start_factor\": 2}",
       "scheduler.warmup.start_factor: expected above 0 and at most 1, got 2"},
      {"\"warmup\": {\"num_steps\": 3, \"shape\": \"square\"}",
       "scheduler.warmup.shape: expected linear, exponential or cosine, got "
       "'square'"},
      {"\"type\": \"WarmupLR\", \"warmup\": {\"num_steps\": 3}",
       "scheduler.warmup: 'WarmupLR' has a warmup of its own: use "
       "scheduler.params.warmup_num_steps"},
      {"\"warmup\": {\"num_steps\": 3}, \"params\": {\"gamma\": 1}",
       "scheduler.type: missing, and there are params"},
      {"\"warmup\": {\"shape\": \"cosine\"}",
       "scheduler.warmup.num_steps: missing: a warmup needs it (0: none)"},
      {"\"params\": {\"gamma\": 1}",
       "scheduler.type: missing: expected WarmupLR or another"},
  };
  for (const auto& [scheduler, fault] : cases) {
    EXPECT_EQ(FaultOf(With(absl::StrCat("\"scheduler\": {", scheduler, "}"))),
              fault);
  }
}

TEST(SchedulerConfigTest, TheBatchScalesRates) {
  const auto scaling = [](absl::string_view members) {
    return absl::StrCat("\"learning_rate_scaling\": {", members, "}");
  };
  const proto::Config config =
      Parsed(scaling("\"rule\": \"sqrt\", \"base_batch_size\": 2"));
  EXPECT_EQ(config.learning_rate_scaling().factor(), 2);
  EXPECT_EQ(config.optimizer().params().lr(), 1e-3);
  // A completed one is read back as it is.
  const absl::StatusOr<proto::Config> again =
      ParseConfig(ConfigToJson(config), "again.json", 1);
  TESSERA_ASSERT_OK(again.status());
  EXPECT_EQ(again->learning_rate_scaling().ShortDebugString(),
            config.learning_rate_scaling().ShortDebugString());
  EXPECT_FALSE(Parsed("\"scheduler\": null").has_learning_rate_scaling());
  const std::pair<const char*, const char*> cases[] = {
      {"\"rule\": \"linear\"",
       "base_batch_size: missing: the rule 'linear' needs it"},
      {"\"rule\": \"linear\", \"base_batch_size\": 0",
       "base_batch_size: expected at least 1, got 0"},
      {"\"rule\": \"linear\", \"base_batch_size\": 2, \"factor\": 3",
       "factor: expected 4, by rule, train_batch_size and base_batch_size, got "
       "3; leave it out"},
      {"\"rule\": \"cube\"", "rule: expected none, linear or sqrt, got 'cube'"},
  };
  for (const auto& [members, fault] : cases) {
    EXPECT_EQ(FaultOf(With(scaling(members))),
              absl::StrCat("learning_rate_scaling.", fault));
  }
}

TEST(SchedulerConfigTest, CyclesNeedAMomentum) {
  const auto fault = [](absl::string_view optimizer,
                        absl::string_view members) {
    return FaultOf(Json(absl::StrCat(
        "\"train_batch_size\": 8, \"optimizer\": ", optimizer, ", ",
        SchedulerOf(
            "OneCycleLR",
            absl::StrCat("\"max_lr\": 1, \"total_steps\": 9", members)))));
  };
  EXPECT_EQ(fault("{\"type\": \"SGD\"}", ""),
            "scheduler.params.cycle_momentum: needs an optimizer with betas or "
            "with a momentum above 0; write false with SGD");
  EXPECT_EQ(fault("{\"type\": \"SGD\"}", ", \"cycle_momentum\": false"), "OK");
  for (const char* type : {"Adafactor", "Adagrad", "RMSprop"}) {
    EXPECT_EQ(
        fault(absl::StrCat("{\"type\": \"", type, "\"}"), ""),
        absl::StrCat("scheduler.params.cycle_momentum: needs an optimizer with "
                     "betas or with a momentum above 0; write false with ",
                     type));
  }
  EXPECT_EQ(fault("{\"type\": \"Muon\"}", ""), "OK");
  EXPECT_EQ(fault("{\"type\": \"AdamWScheduleFree\"}", ""),
            "scheduler.params.cycle_momentum: write false with "
            "AdamWScheduleFree: its average is found by one beta1");
  EXPECT_EQ(fault("{\"type\": \"SGD\", \"params\": {\"momentum\": 0.9}}", ""),
            "OK");
  EXPECT_EQ(fault("{\"type\": \"AdamW\"}", ""), "OK");
}

// A completed schedule of every type resolves to itself.
TEST(SchedulerConfigTest, CompletedSchedulersStay) {
  for (const std::string& members :
       {SchedulerOf("OneCycleLR",
                    "\"max_lr\": 1, \"epochs\": 3, \"steps_per_epoch\": 2"),
        SchedulerOf("CyclicLR", "\"base_lr\": 0, \"max_lr\": 1"),
        SchedulerOf("MultiStepLR", "\"milestones\": [1, 5]"),
        SchedulerOf("ConstantLR", ""),
        SchedulerOf("WSD", "\"total_num_steps\": 9, \"decay_num_steps\": 2")}) {
    const proto::Config config = Parsed(members);
    const absl::StatusOr<proto::Config> again =
        ParseConfig(ConfigToJson(config), "again.json", 1);
    TESSERA_ASSERT_OK(again.status());
    EXPECT_EQ(again->scheduler().ShortDebugString(),
              config.scheduler().ShortDebugString());
  }
}

}  // namespace
}  // namespace tessera
