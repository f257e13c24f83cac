// Tests configurations that are made of fields in the code.
#include "config/training/training_config.h"

#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "config/config.h"
#include "gmock/gmock.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::google::protobuf::util::MessageDifferencer;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Every field, in the order in which a program may write them.
TrainingConfig Whole() {
  return {.stage = 3,
          .batch = 64,
          .micro_batch = 8,
          .accumulation = 4,
          .bf16 = true,
          .fp16 = false,
          .optimizer = {.type = "AdamW",
                        .lr = 3e-4,
                        .betas = {0.9, 0.95},
                        .eps = 1e-9,
                        .weight_decay = 0.1,
                        .no_decay = "auto"},
          .gradient_clipping = 0.5,
          .schedule = {.type = "WarmupCosineLR",
                       .warmup_steps = 10,
                       .total_steps = 100},
          .offload = {.optimizer = "nvme",
                      .parameters = "cpu",
                      .nvme_path = "/swap \"1\""},
          .recompute = {"Block", "Head"},
          .checkpoints = {.folder = "run7",
                          .every_steps = 50,
                          .every_minutes = 2.5,
                          .keep_last = 3,
                          .async = true},
          .steps_per_print = 20,
          .json = R"({"sharding": {"report_grad_norm": true}})"};
}

constexpr char kFile[] = R"({
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/swap \"1\""},
    "offload_param": {"device": "cpu"}
  },
  "train_batch_size": 64, "train_micro_batch_size_per_gpu": 8,
  "gradient_accumulation_steps": 4,
  "bf16": {"enabled": true}, "fp16": {"enabled": false},
  "optimizer": {
    "type": "AdamW", "no_decay": "auto",
    "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-9,
               "weight_decay": 0.1}
  },
  "gradient_clipping": 0.5,
  "scheduler": {"type": "WarmupCosineLR",
                "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
  "activation_checkpointing": {"units": ["Block", "Head"]},
  "checkpoint": {"folder": "run7", "every_steps": 50, "every_minutes": 2.5,
                 "keep_last": 3, "async": true},
  "steps_per_print": 20,
  "sharding": {"report_grad_norm": true}
})";

TEST(TrainingConfigTest, EveryFieldIsTheKeyOfAFile) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config got, ToConfig(Whole(), 2));
  TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config expected,
                               ParseConfig(kFile, "f.json", 2));
  std::string difference;
  MessageDifferencer differencer;
  differencer.ReportDifferencesToString(&difference);
  EXPECT_TRUE(differencer.Compare(expected, got)) << difference;
}

TEST(TrainingConfigTest, WhatIsUnsetIsNoKey) {
  EXPECT_THAT(KeysOf({}), IsEmpty());
  EXPECT_THAT(KeysOf({.bf16 = false, .optimizer = {.lr = 0}}),
              ElementsAre("bf16.enabled=false", "optimizer.params.lr=0"));
}

// Numbers are exact, and as short as that allows.
TEST(TrainingConfigTest, NumbersAreReadAsTheyAre) {
  const double third = 1.0 / 3;
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ToConfig({.batch = 1, .optimizer = {.type = "AdamW", .lr = third}}, 1));
  EXPECT_EQ(config.optimizer().params().lr(), third);
  EXPECT_THAT(KeysOf({.gradient_clipping = 1e-3}),
              ElementsAre("gradient_clipping=0.001"));
}

std::string Fault(const TrainingConfig& config,
                  const ConfigOverrides& overrides = {}) {
  return std::string(ToConfig(config, 2, {}, overrides).status().message());
}

TEST(TrainingConfigTest, FaultsAreThoseOfAFile) {
  EXPECT_EQ(Fault({.stage = 7, .batch = 2}),
            "TrainingConfig: zero_optimization.stage: expected 0, 1, 2 or 3, "
            "got 7");
  EXPECT_THAT(Fault({.batch = 2, .optimizer = {.type = "AdamX"}}),
              HasSubstr("TrainingConfig: optimizer.type: "));
  EXPECT_EQ(
      Fault({.batch = 2, .json = "{\"sharding\":\n {\"report_grad\": true}}"}),
      "TrainingConfig:2:3: sharding.report_grad: unknown key, did you "
      "mean 'report_grad_norm'? (\"unknown_keys\": \"warn\" ignores such "
      "keys)");
  EXPECT_THAT(Fault({.batch = 2, .json = "{\"bf16\": "}),
              HasSubstr("TrainingConfig:1:"));
  // All at once.
  EXPECT_THAT(Fault({.stage = 7, .batch = 2, .gradient_clipping = -2}),
              AllOf(HasSubstr("TrainingConfig: zero_optimization.stage: "),
                    HasSubstr("TrainingConfig: gradient_clipping: ")));
}

TEST(TrainingConfigTest, AKeyIsSetOnce) {
  EXPECT_EQ(
      Fault({.batch = 2,
             .bf16 = true,
             .json = "{\"bfloat16\": "
                     "{\"enabled\": true}}"}),
      "TrainingConfig: bf16.enabled=true: json has this key, too, at 1:15; "
      "leave one of them out");
  // Others of the same section are no fault.
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ToConfig({.batch = 2,
                .bf16 = true,
                .json = "{\"bf16\": {\"check_grad_overflow\": false}}"},
               2));
  EXPECT_TRUE(config.bf16().enabled());
  EXPECT_FALSE(config.bf16().check_grad_overflow());
  EXPECT_THAT(
      Fault({.stage = 1, .batch = 2, .json = "{\"zero_optimization\": true}"}),
      HasSubstr("zero_optimization is a boolean there, expected an "
                "object"));
}

TEST(TrainingConfigTest, OverridesGoBefore) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ToConfig({.stage = 3, .batch = 2}, 2, {}, {"zero_optimization.stage=1"}));
  EXPECT_EQ(config.zero_optimization().stage(), 1);
  EXPECT_EQ(Fault({.stage = 3, .batch = 2}, {"zero_optimization.stage=9"}),
            "--set zero_optimization.stage: expected 0, 1, 2 or 3, got 9");
}

TEST(TrainingConfigTest, ItsCommunicationIsRead) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Communication section,
      CommunicationOf({.json = R"({"communication": {"backend": "gloo"}})"}));
  EXPECT_EQ(section.backend(), "gloo");
  EXPECT_THAT(
      CommunicationOf({.json = R"({"communication": {"backend": "gluu"}})"}),
      StatusIs(StatusCode::kInvalidArgument,
               HasSubstr("TrainingConfig:1:31: communication.backend")));
}

}  // namespace
}  // namespace tessera
