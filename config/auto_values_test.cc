#include "config/auto_values.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "config/config.h"
#include "config/config_report.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kAll[] = R"({
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto",
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto",
    "eps": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto",
    "warmup_max_lr": "auto", "warmup_num_steps": "auto",
    "total_num_steps": "auto"}},
  "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
  "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto"}})";

AutoValues Parsed(absl::string_view text) {
  const absl::StatusOr<AutoValues> values = AutoValues::Parse(text);
  EXPECT_TRUE(values.ok()) << values.status();
  return values.ok() ? *values : AutoValues();
}

std::vector<std::string> Lines(const std::vector<ConfigFault>& faults) {
  std::vector<std::string> lines;
  for (const ConfigFault& fault : faults) {
    lines.push_back(absl::StrCat(fault.path, ": ", fault.what));
  }
  return lines;
}

TEST(AutoValues, FillAsHuggingFaceDoes) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config c,
      ParseConfig(kAll, "f.json", 4,
                  Parsed("per_device_train_batch_size=3,"
                         "gradient_accumulation_steps=2,learning_rate=5e-5,"
                         "adam_beta1=0.8,adam_beta2=0.9,adam_epsilon=1e-6,"
                         "weight_decay=0.1,max_grad_norm=0.5,warmup_steps=100,"
                         "max_steps=1000,bf16=true,hidden_size=4096")));
  EXPECT_EQ(c.train_batch_size(), 24);
  EXPECT_EQ(c.train_micro_batch_size_per_gpu(), 3);
  EXPECT_EQ(c.gradient_accumulation_steps(), 2);
  EXPECT_EQ(c.gradient_clipping(), 0.5);
  EXPECT_EQ(c.optimizer().params().lr(), 5e-5);
  EXPECT_THAT(c.optimizer().params().betas(), ElementsAre(0.8, 0.9));
  EXPECT_EQ(c.optimizer().params().eps(), 1e-6);
  EXPECT_EQ(c.optimizer().params().weight_decay(), 0.1);
  EXPECT_EQ(c.scheduler().params().warmup_min_lr(), 0);
  EXPECT_EQ(c.scheduler().params().warmup_max_lr(), 5e-5);
  EXPECT_EQ(c.scheduler().params().warmup_num_steps(), 100);
  EXPECT_EQ(c.scheduler().params().total_num_steps(), 1000);
  EXPECT_TRUE(c.bf16().enabled());
  EXPECT_FALSE(c.fp16().enabled());
  EXPECT_EQ(c.zero_optimization().reduce_bucket_size(), 4096 * 4096);
  // 0.9 * 4096^2 is no integer: DeepSpeed would refuse it.
  EXPECT_EQ(c.zero_optimization().stage3_prefetch_bucket_size(), 15099494);
  EXPECT_EQ(c.zero_optimization().stage3_param_persistence_threshold(), 40960);
}

TEST(AutoValues, WhatIsMissingIsNamed) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const ConfigReport report,
                               ReadConfig(kAll, "f.json", 4));
  constexpr char kFrom[] = " (tessera::AutoValues, or --auto)";
  const auto needs = [&](const char* path, const char* value) {
    return absl::StrCat(path, ": \"auto\" needs ", value, kFrom);
  };
  EXPECT_THAT(
      Lines(report.faults),
      ElementsAre(
          needs("train_batch_size", "per_device_train_batch_size"),
          needs("train_micro_batch_size_per_gpu",
                "per_device_train_batch_size"),
          needs("gradient_accumulation_steps", "gradient_accumulation_steps"),
          needs("gradient_clipping", "max_grad_norm"),
          needs("optimizer.params.lr", "learning_rate"),
          needs("optimizer.params.betas", "adam_beta1 and adam_beta2"),
          needs("optimizer.params.eps", "adam_epsilon"),
          needs("optimizer.params.weight_decay", "weight_decay"),
          needs("scheduler.params.warmup_min_lr", "learning_rate"),
          needs("scheduler.params.warmup_max_lr", "learning_rate"),
          needs("scheduler.params.warmup_num_steps", "warmup_steps"),
          needs("scheduler.params.total_num_steps", "max_steps")));
  // The values are DeepSpeed's, but a note says so.
  EXPECT_THAT(
      Lines(report.notes),
      ElementsAre(
          absl::StrCat("fp16.enabled: \"auto\" is its default here: to resolve "
                       "it needs fp16",
                       kFrom),
          absl::StrCat("bf16.enabled: \"auto\" is its default here: to resolve "
                       "it needs bf16",
                       kFrom),
          HasSubstr("zero_optimization.reduce_bucket_size: \"auto\" is its"),
          HasSubstr("stage3_prefetch_bucket_size: \"auto\" is its"),
          HasSubstr("stage3_param_persistence_threshold: \"auto\" is its")));
}

TEST(AutoValues, OtherKeysHaveNoRule) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const ConfigReport report,
      ReadConfig("{\"train_batch_size\": 4, \"steps_per_print\": \"auto\", "
                 "\"zero_optimization\": {\"sub_group_size\": \"auto\"}}",
                 "f.json", 1));
  EXPECT_THAT(Lines(report.faults),
              ElementsAre("steps_per_print: no rule says what \"auto\" is "
                          "here: write the value"));
  EXPECT_THAT(Lines(report.notes),
              ElementsAre("zero_optimization.sub_group_size: \"auto\" is its "
                          "default here"));
}

TEST(AutoValues, WhatIsWrittenCounts) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const ConfigReport report,
      ReadConfig("{\"train_micro_batch_size_per_gpu\": 4, "
                 "\"train_batch_size\": \"auto\", \"gradient_clipping\": 1.0}",
                 "f.json", 2,
                 Parsed("per_device_train_batch_size=2,max_grad_norm=1")));
  EXPECT_THAT(report.faults, IsEmpty());
  EXPECT_EQ(report.config.train_batch_size(), 8);
  EXPECT_THAT(Lines(report.notes),
              ElementsAre("train_micro_batch_size_per_gpu: is 4 here, and 2 by "
                          "per_device_train_batch_size: what is written here "
                          "counts"));
}

TEST(AutoValues, ValuesAreCheckedLikeWrittenOnes) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const ConfigReport report,
      ReadConfig("{\"train_batch_size\": 4, \"gradient_clipping\": \"auto\"}",
                 "f.json", 1, Parsed("max_grad_norm=-1")));
  EXPECT_THAT(Lines(report.faults),
              ElementsAre("gradient_clipping: expected a finite number of at "
                          "least 0, got -1: 0 is no clipping"));
}

// -1 is Hugging Face's default.
TEST(AutoValues, StepsThatEpochsSayAreNotKnown) {
  const auto read = [](absl::string_view steps, absl::string_view values) {
    return ReadConfig(
        absl::StrCat("{\"train_batch_size\": 4, \"scheduler\": {\"type\": "
                     "\"WarmupDecayLR\", \"params\": {\"total_num_steps\": ",
                     steps, "}}}"),
        "f.json", 1, Parsed(values));
  };
  for (const char* none : {"-1", "0"}) {
    TESSERA_ASSERT_OK_AND_ASSIGN(
        const ConfigReport report,
        read("\"auto\"", absl::StrCat("max_steps=", none)));
    EXPECT_THAT(
        Lines(report.faults),
        ElementsAre(absl::StrCat(
            "scheduler.params.total_num_steps: \"auto\" needs max_steps "
            "(tessera::AutoValues, or --auto), and ",
            none,
            " leaves it to num_train_epochs: give the optimizer steps of the "
            "run, epochs * batches of one / gradient_accumulation_steps")));
    TESSERA_ASSERT_OK_AND_ASSIGN(const ConfigReport written,
                                 read("70", absl::StrCat("max_steps=", none)));
    EXPECT_THAT(Lines(written.faults), ElementsAre());
    EXPECT_THAT(Lines(written.notes), ElementsAre());
  }
  TESSERA_ASSERT_OK_AND_ASSIGN(const ConfigReport given,
                               read("\"auto\"", "max_steps=9"));
  EXPECT_EQ(given.config.scheduler().params().total_num_steps(), 9);
}

TEST(AutoValues, ParseNamesWhatIsWrong) {
  const std::pair<const char*, const char*> cases[] = {
      {"learning_rat=1",
       "auto value 'learning_rat': unknown; did you mean 'learning_rate'?"},
      {"x=1", "auto value 'x': unknown; there are per_device_train_batch_size"},
      {"hidden_size=1.5",
       "auto value 'hidden_size': expected an integer, got '1.5'"},
      {"bf16", "auto value 'bf16': expected true or false, got ''"},
      {"fp16=1,fp16=0", "auto value 'fp16' is given twice"},
  };
  for (const auto& [text, message] : cases) {
    EXPECT_THAT(AutoValues::Parse(text),
                StatusIs(StatusCode::kInvalidArgument, HasSubstr(message)));
  }
  TESSERA_EXPECT_OK(AutoValues::Parse(""));
  TESSERA_EXPECT_OK(AutoValues::Parse(" learning_rate = 1e-3 , "));
}

}  // namespace
}  // namespace tessera
