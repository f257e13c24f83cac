#include <fstream>
#include <string>

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

constexpr char kFile[] = R"({
  "train_micro_batch_size_per_gpu": 4,
  "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.5, 0.6]}},
  "zero_optimization": {"stage": 3}
})";

absl::StatusOr<proto::Config> Read(const ConfigOverrides& overrides,
                                   int world_size = 2) {
  return ParseConfig(kFile, "f.json", world_size, {}, overrides);
}

// The message with these overrides.
std::string Said(const ConfigOverrides& overrides) {
  return std::string(Read(overrides).status().message());
}

TEST(OverridesTest, ReplaceAndAdd) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      Read({"zero_optimization.stage=1", "optimizer.params.lr=1e-3",
            "optimizer.params.betas=[0.9, 0.95]", "optimizer.type=Adam",
            "bf16.enabled=true", "communication={\"backend\": \"gloo\"}",
            "gradient_clipping=2", "gradient_clipping=0.5"}));
  EXPECT_EQ(config.zero_optimization().stage(), 1);
  EXPECT_EQ(config.optimizer().type(), "Adam");
  EXPECT_EQ(config.optimizer().params().lr(), 1e-3);
  EXPECT_THAT(config.optimizer().params().betas(), ElementsAre(0.9, 0.95));
  EXPECT_TRUE(config.bf16().enabled());
  EXPECT_EQ(config.communication().backend(), "gloo");
  EXPECT_EQ(config.gradient_clipping(), 0.5);  // the last one
  EXPECT_EQ(config.train_batch_size(), 8);
}

// Batch sizes and defaults are worked out from what is set.
TEST(OverridesTest, ComeBeforeCompletion) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      Read({"train_batch_size=32", "zero_optimization.stage=auto"}));
  EXPECT_EQ(config.gradient_accumulation_steps(), 4);
  EXPECT_TRUE(config.zero_optimization().auto_stage());
}

TEST(OverridesTest, AKeyHasItsOtherNames) {
  constexpr char kText[] = R"({"train_batch_size": 2,
      "zero_optimization": {"stage": 3, "prefetch_bucket_size": 7}})";
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ParseConfig(kText, "f.json", 2, {},
                  {"zero_optimization.stage3_prefetch_bucket_size=9"}));
  EXPECT_EQ(config.zero_optimization().stage3_prefetch_bucket_size(), 9);
}

TEST(OverridesTest, FaultsAreThoseOfAFile) {
  EXPECT_EQ(Said({"zero_optimization.stage=7"}),
            "--set zero_optimization.stage: expected 0, 1, 2 or 3, got 7");
  EXPECT_THAT(Said({"zero_optimization.stge=1"}),
              HasSubstr("--set zero_optimization.stge: unknown key, did you "
                        "mean 'stage'?"));
  EXPECT_THAT(Said({"optimizer.params.lr=fast"}),
              HasSubstr("--set optimizer.params.lr: expected a number, got the "
                        "string \"fast\""));
  EXPECT_THAT(Said({"train_batch_size=7"}), HasSubstr("train_batch_size"));
  EXPECT_THAT(Said({"optimizer.params.betas=[0.9,"}),
              HasSubstr("--set optimizer.params.betas:1:6: expected"));
}

TEST(OverridesTest, SaysHowOneIsWritten) {
  for (const std::string text : {"stage", "=3", "a..b=3", ".a=3", "a.=3", ""}) {
    EXPECT_THAT(Read({text}).status(),
                StatusIs(StatusCode::kInvalidArgument,
                         HasSubstr(absl::StrCat("--set ", text,
                                                ": expected KEY=VALUE"))))
        << text;
  }
  EXPECT_EQ(Said({"gradient_clipping=1", "gradient_clipping.norm=2"}),
            "--set gradient_clipping.norm=2: gradient_clipping is a number "
            "there, expected an object");
}

// A string may be without quotes, and have an equals sign.
TEST(OverridesTest, WordsAreStrings) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      Read({"communication.nccl.NCCL_DEBUG=INFO",
            "communication.nccl.NCCL_TOPO_FILE=\"a=b\"",
            "communication.nccl.NCCL_GRAPH_FILE=c=d",
            "communication.nccl.NCCL_IB_TIMEOUT=22",
            "communication.nccl.NCCL_IB_DISABLE=true",
            "tensorboard.job_name=007"}));
  const auto& nccl = config.communication().nccl();
  EXPECT_EQ(nccl.at("NCCL_DEBUG"), "INFO");
  EXPECT_EQ(nccl.at("NCCL_TOPO_FILE"), "a=b");
  EXPECT_EQ(nccl.at("NCCL_GRAPH_FILE"), "c=d");
  EXPECT_EQ(nccl.at("NCCL_IB_TIMEOUT"), "22");
  EXPECT_EQ(nccl.at("NCCL_IB_DISABLE"), "true");
  EXPECT_EQ(config.tensorboard().job_name(), "007");
}

TEST(OverridesTest, OfFiles) {
  const std::string json = testing::TempDir() + "/overrides.json";
  std::ofstream(json) << kFile;
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      LoadConfig(json, 2, {}, false, {"zero_optimization.stage=2"}));
  EXPECT_EQ(config.zero_optimization().stage(), 2);
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Communication section,
      LoadCommunication(json, false, {"communication.backend=gloo"}));
  EXPECT_EQ(section.backend(), "gloo");
  const std::string text = testing::TempDir() + "/overrides.textproto";
  std::ofstream(text) << "train_batch_size: 2";
  EXPECT_THAT(LoadConfig(text, 2, {}, false, {"gradient_clipping=1"}),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("overrides.textproto: --set "
                                 "gradient_clipping=1: expected a "
                                 "configuration in JSON")));
}

// --------------------------------------------------------- JSON in the program

TEST(ConfigFromJsonTest, IsAFileWithoutAName) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ConfigFromJson(kFile, 2, {"zero_optimization.stage=0"}));
  EXPECT_EQ(config.train_batch_size(), 8);
  EXPECT_EQ(config.zero_optimization().stage(), 0);
  EXPECT_EQ(
      ConfigFromJson("{\"train_batch_size\": 0}", 1).status().message(),
      ParseConfig("{\"train_batch_size\": 0}", "<code>", 1).status().message());
  EXPECT_THAT(ConfigFromJson("{\"train_batch_size\": 0}", 1),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("<code>:1:22: train_batch_size: ")));
}

}  // namespace
}  // namespace tessera
