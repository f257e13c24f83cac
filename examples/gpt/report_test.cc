#include "examples/gpt/report.h"

#include <cmath>

#include "examples/gpt/rank_memory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

using ::testing::HasSubstr;

TEST(ReportTest, JsonIsOneLineWithExactLosses) {
  RunReport report;
  report.losses = {5.5f, 2.25f};
  report.after_losses = {0.1f, 1.0f};
  report.held_out_loss = 3.0f;
  report.tokens_per_second = 1234;
  report.world_size = 2;
  report.stage = 3;
  report.held = {1, 2, 3};
  report.replicated = {2, 4, 6};
  report.sample = "a\"\\\n\xe9z";
  EXPECT_EQ(ToJson(report),
            R"({"first_loss": 5.5, "last_loss": 2.25, "losses": )"
            R"(["0x1.6p+2", "0x1.2p+1"], "uninterrupted_losses": )"
            R"(["0x1.99999ap-4", "0x1p+0"], "resumed_losses": [], )"
            R"("held_out_loss": "0x1.8p+1", "tok_s": 1234, )"
            R"("world": 2, "stage": 3, "bytes_per_rank": {"parameters": 1, )"
            R"("gradients": 2, "optimizer": 3}, "replicated_bytes": )"
            R"({"parameters": 2, "gradients": 4, "optimizer": 6}, )"
            R"("sample": "a\"\\\u000a\u00e9z"})");
}

TEST(ReportTest, LossesOfAResumedRunHaveAnotherName) {
  RunReport report;
  report.resumed = true;
  report.after_losses = {1.0f};
  const std::string json = ToJson(report);
  EXPECT_THAT(json, HasSubstr(R"("uninterrupted_losses": [])"));
  EXPECT_THAT(json, HasSubstr(R"("resumed_losses": ["0x1p+0"])"));
}

TEST(ReportTest, WhatIsNotANumberIsNull) {
  RunReport report;
  EXPECT_THAT(ToJson(report), HasSubstr(R"("first_loss": null)"));
  EXPECT_THAT(ToJson(report), HasSubstr(R"("held_out_loss": null)"));
  report.losses = {1.0f, std::nanf("")};
  EXPECT_THAT(ToJson(report), HasSubstr(R"("last_loss": null)"));
}

TEST(ReportTest, TableSetsHeldBesideReplicated) {
  RunReport report;
  report.stage = 3;
  report.held = {20'000'000, 0, 40'000'000};
  report.replicated = {40'000'000, 40'000'000, 80'000'000};
  EXPECT_EQ(StateTable(report),
            "Each rank holds          stage 3    replicated\n"
            "  parameters               20.0 MB       40.0 MB\n"
            "  gradients                 0.0 MB       40.0 MB\n"
            "  optimizer states         40.0 MB       80.0 MB\n"
            "  total                    60.0 MB      160.0 MB\n");
}

TEST(RankMemoryTest, MemoryOfManyRanksIsARange) {
  const int64_t mb = 1'000'000;
  EXPECT_EQ(Describe({{412 * mb, 96 * mb}, {409 * mb, 97 * mb}}),
            "412/409 MB, counted peak 96/97");
  EXPECT_EQ(Describe({{5 * mb, 1 * mb},
                      {4 * mb, 1 * mb},
                      {6 * mb, 2 * mb},
                      {5 * mb, 1 * mb},
                      {5 * mb, 3 * mb}}),
            "4..6 MB, counted peak 1..3");
}

}  // namespace
