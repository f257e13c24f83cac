#include "engine/plan/plan_changes.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// States of 400 bytes at stage 0, activations of 600; computed again 100.
PlanReport Report(int64_t memory_bytes) {
  PlanReport report;
  report.memory_bytes = memory_bytes;
  report.micro_batch = 2;
  for (int s = 0; s <= 3; ++s) {
    StagePlan stage;
    stage.stage = s;
    stage.peak.Add(PlanKind::kOptimizer, 400 - 100 * s);
    stage.recomputed_peak = stage.peak;
    stage.peak.Add(PlanKind::kActivations, 600);
    stage.recomputed_peak.Add(PlanKind::kActivations, 100);
    report.stages.push_back(stage);
  }
  return report;
}

std::vector<std::string> Changes(int64_t memory_bytes, int stage = 0) {
  std::vector<std::string> all;
  for (const PlanChange& change :
       CheapestThatFit(Report(memory_bytes), stage, 2)) {
    all.push_back(change.what);
  }
  return all;
}

const char kHalf[] =
    "half of train_micro_batch_size_per_gpu, and twice "
    "gradient_accumulation_steps";
const char kRecompute[] = "activation_checkpointing.units \"auto\"";

TEST(PlanChangesTest, StagesThatSendNoMoreComeFirst) {
  EXPECT_THAT(Changes(900), ElementsAre("zero_optimization.stage 1",
                                        "zero_optimization.stage 2"));
  EXPECT_THAT(Changes(800), ElementsAre("zero_optimization.stage 2", kHalf));
}

TEST(PlanChangesTest, OneChangeOrTwo) {
  // 400 + 300; 300 + 300 with stage 1.
  EXPECT_THAT(
      Changes(650),
      ElementsAre(std::string("zero_optimization.stage 1, with ") + kHalf,
                  std::string("zero_optimization.stage 2, with ") + kHalf));
  EXPECT_THAT(
      Changes(200, /*stage=*/3),
      ElementsAre(kRecompute, std::string(kHalf) + ", with " + kRecompute));
}

TEST(PlanChangesTest, PeaksAreThoseWithTheChange) {
  const auto changes = CheapestThatFit(Report(800), 0, 2);
  EXPECT_EQ(changes[0].peak_bytes, 800);
  EXPECT_EQ(changes[1].peak_bytes, 700);
}

TEST(PlanChangesTest, AMicroBatchOfOneHasNoHalf) {
  PlanReport report = Report(650);
  report.micro_batch = 1;
  for (const PlanChange& change : CheapestThatFit(report, 0, 9)) {
    EXPECT_THAT(change.what, Not(HasSubstr("half")));
  }
}

TEST(PlanChangesTest, NothingFits) { EXPECT_THAT(Changes(100), IsEmpty()); }

}  // namespace
}  // namespace tessera
