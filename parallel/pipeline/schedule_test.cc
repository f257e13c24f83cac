#include "parallel/pipeline/schedule.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "parallel/pipeline/pipeline_times.h"

namespace tessera {
namespace {

using Kind = PipelineAction::Kind;

// "F0 F1 B0 B1".
std::string Text(const std::vector<PipelineAction>& actions) {
  std::string text;
  for (const PipelineAction& each : actions) {
    absl::StrAppend(&text, text.empty() ? "" : " ",
                    each.kind == Kind::kForward ? "F" : "B", each.micro_batch);
  }
  return text;
}

std::string TextOf(PipelineSchedule schedule, int stage) {
  return Text(ScheduleOf(schedule, stage, /*stages=*/3, /*micro_batches=*/4));
}

TEST(PipelineScheduleTest, OrdersAreThoseOfThePicture) {
  EXPECT_EQ(TextOf(PipelineSchedule::k1F1B, 0), "F0 F1 F2 B0 F3 B1 B2 B3");
  EXPECT_EQ(TextOf(PipelineSchedule::k1F1B, 1), "F0 F1 B0 F2 B1 F3 B2 B3");
  EXPECT_EQ(TextOf(PipelineSchedule::k1F1B, 2), "F0 B0 F1 B1 F2 B2 F3 B3");
  EXPECT_EQ(TextOf(PipelineSchedule::kGPipe, 1), "F0 F1 F2 F3 B0 B1 B2 B3");
  EXPECT_EQ(Text(ScheduleOf(PipelineSchedule::k1F1B, 0, 1, 2)), "F0 B0 F1 B1");
  EXPECT_EQ(Text(ScheduleOf(PipelineSchedule::k1F1B, 0, 4, 0)), "");
}

TEST(PipelineScheduleTest, BubbleShrinksWithMicroBatches) {
  EXPECT_EQ(BubbleOf(1, 1), 0);
  EXPECT_EQ(BubbleOf(4, 1), 0.75);
  EXPECT_EQ(BubbleOf(2, 3), 0.25);
}

// Schedule, number of stages, number of micro-batches.
class PipelineTimesTest
    : public ::testing::TestWithParam<
          std::tuple<PipelineSchedule, int /*stages*/, int /*micro*/>> {
 protected:
  int stages() const { return std::get<1>(GetParam()); }
  int micro_batches() const { return std::get<2>(GetParam()); }
  bool gpipe() const {
    return std::get<0>(GetParam()) == PipelineSchedule::kGPipe;
  }

  PipelineSpeeds Speeds(const std::vector<StageSeconds>& seconds) const {
    PipelineSpeeds speeds;
    speeds.schedule = std::get<0>(GetParam());
    speeds.micro_batches = micro_batches();
    for (int s = 0; s < stages(); ++s) {
      speeds.stages.push_back(seconds[static_cast<size_t>(s) % seconds.size()]);
    }
    return speeds;
  }
};

TEST_P(PipelineTimesTest, NothingBeginsBeforeWhatItNeeds) {
  PipelineSpeeds speeds = Speeds({{1, 2}, {3, 1}, {0.5, 4}});
  speeds.transfer_seconds = 0.25;
  const PipelineTimes times = PipelineTimesOf(speeds);
  ASSERT_EQ(times.stages.size(), speeds.stages.size());
  std::map<std::tuple<int, Kind, int>, TimedAction> found;
  for (int s = 0; s < stages(); ++s) {
    double end = 0;
    std::map<Kind, int> next;
    for (const TimedAction& each : times.stages[s].actions) {
      EXPECT_EQ(each.action.micro_batch, next[each.action.kind]++);
      EXPECT_GE(each.begin, end);
      end = each.end;
      found[{s, each.action.kind, each.action.micro_batch}] = each;
    }
    EXPECT_LE(end, times.seconds);
  }
  EXPECT_EQ(found.size(), 2U * stages() * micro_batches());
  for (int i = 0; i < micro_batches(); ++i) {
    for (int s = 0; s < stages(); ++s) {
      const TimedAction& forward = found[{s, Kind::kForward, i}];
      const TimedAction& backward = found[{s, Kind::kBackward, i}];
      EXPECT_GE(backward.begin, forward.end);
      if (s == 0) continue;
      EXPECT_GE(forward.begin, (found[{s - 1, Kind::kForward, i}].end) + 0.25);
      EXPECT_GE((found[{s - 1, Kind::kBackward, i}].begin),
                backward.end + 0.25);
    }
  }
}

TEST_P(PipelineTimesTest, EqualStagesTakeTheTimeOfTheFormula) {
  const PipelineTimes times = PipelineTimesOf(Speeds({{1, 2}}));
  EXPECT_EQ(times.seconds, (micro_batches() + stages() - 1) * 3);
  for (const PipelineTimes::Stage& stage : times.stages) {
    EXPECT_NEAR(stage.idle_share, BubbleOf(stages(), micro_batches()), 1e-12);
  }
}

TEST_P(PipelineTimesTest, MicroBatchesInFlightAreThoseOfTheSchedule) {
  const PipelineTimes times = PipelineTimesOf(Speeds({{1, 2}}));
  for (int s = 0; s < stages(); ++s) {
    const int most = gpipe() ? micro_batches() : stages() - s;
    EXPECT_EQ(times.stages[s].most_in_flight, std::min(most, micro_batches()));
  }
}

// The slowest stage is never idle between its first and its last action.
TEST_P(PipelineTimesTest, TheSlowestStageSetsThePace) {
  std::vector<StageSeconds> seconds(static_cast<size_t>(stages()), {1, 2});
  seconds.back() = {10, 20};
  const PipelineTimes times = PipelineTimesOf(Speeds(seconds));
  EXPECT_EQ(times.seconds, micro_batches() * 30 + (stages() - 1) * 3);
}

INSTANTIATE_TEST_SUITE_P(
    All, PipelineTimesTest,
    ::testing::Combine(::testing::Values(PipelineSchedule::k1F1B,
                                         PipelineSchedule::kGPipe),
                       ::testing::Range(1, 6), ::testing::Range(1, 10)),
    [](const auto& info) {
      return absl::StrCat(
          std::get<0>(info.param) == PipelineSchedule::kGPipe ? "GPipe"
                                                              : "OneF1B",
          "Stages", std::get<1>(info.param), "Micro", std::get<2>(info.param));
    });

TEST(PipelineTimesOfTest, NoMicroBatchesTakeNoTime) {
  PipelineSpeeds speeds;
  speeds.micro_batches = 0;
  speeds.stages = {{1, 1}, {1, 1}};
  EXPECT_EQ(PipelineTimesOf(speeds).seconds, 0);
}

}  // namespace
}  // namespace tessera
