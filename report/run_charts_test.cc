#include "report/run_charts.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

std::vector<Chart> ChartsOfLines(const std::string& lines) {
  RunFiles run;
  ReadMetrics(lines, "m", &run);
  std::vector<Chart> charts;
  for (ChartGroup& group : ChartsOf(run)) {
    for (Chart& chart : group.charts) charts.push_back(std::move(chart));
  }
  return charts;
}

std::string TextOf(const std::vector<Chart>& charts) {
  std::string text;
  for (const Chart& chart : charts) {
    for (const ChartLine& line : chart.lines) {
      absl::StrAppend(&text, chart.title, "=", line.name, "\n");
    }
  }
  return text;
}

TEST(ChartsTest, EverySeriesIsInOne) {
  const auto charts = ChartsOfLines(
      "{\"step\": 1, \"loss\": 2, \"lr\": 1, \"lr/slow\": 2, \"step_ms\": 10, "
      "\"exposed_comm_ms\": 1, \"memory_parameters_bytes\": 5, "
      "\"memory_peak_bytes\": 6, \"step_ms_slowest\": 11, "
      "\"step_ms_fastest\": 9, \"of the program\": 3, \"eval/loss\": 4}");
  EXPECT_EQ(TextOf(charts),
            "loss=loss\nloss=eval/loss\n"
            "learning rate=default\nlearning rate=slow\n"
            "time of a step=step\n"
            "slowest rank behind the fastest=step\n"
            "share of a step that was waited=for communication (exposed)\n"
            "held at the peak of a step, by kind=parameters\n"
            "held at the peak of a step, by kind=peak\n"
            "of the program=of the program\n");
  EXPECT_THAT(charts[3].lines[0].y, ElementsAre(2));
  EXPECT_THAT(charts[4].lines[0].y, ElementsAre(10));  // %
}

// What another chart shows already is not shown again.
TEST(ChartsTest, NoCurveIsThereTwice) {
  const std::string both = TextOf(ChartsOfLines(
      "{\"step\": 1, \"tokens_per_second\": 100, \"samples_per_second\": 10}\n"
      "{\"step\": 2, \"tokens_per_second\": 300, \"samples_per_second\": 30}"));
  EXPECT_THAT(both, HasSubstr("tokens per second, all ranks"));
  EXPECT_THAT(both, Not(HasSubstr("samples")));
  const std::string other = TextOf(ChartsOfLines(
      "{\"step\": 1, \"tokens_per_second\": 100, \"samples_per_second\": 10}\n"
      "{\"step\": 2, \"tokens_per_second\": 300, \"samples_per_second\": 10}"));
  EXPECT_THAT(other, HasSubstr("samples per second, all ranks"));
  // Without the time of a step, waits have no share of it.
  EXPECT_THAT(TextOf(ChartsOfLines("{\"step\": 1, \"data_wait_ms\": 2}")),
              HasSubstr("waited in a step=for data"));
  EXPECT_THAT(TextOf(ChartsOfLines("{\"step\": 1, \"memory_peak_bytes\": 2}")),
              HasSubstr("peak of a step=peak"));
}

TEST(ChartsTest, RowsAreFull) {
  const std::string line =
      "{\"step\": 1, \"loss\": 2, \"lr\": 1, \"grad_norm\": 3";
  auto charts = ChartsOfLines(line + "}");
  ASSERT_THAT(charts, SizeIs(3));
  EXPECT_TRUE(charts[0].wide);
  EXPECT_FALSE(charts[1].row || charts[2].row);
  charts = ChartsOfLines(line + ", \"loss_scale\": 4}");
  ASSERT_THAT(charts, SizeIs(4));
  EXPECT_TRUE(charts[3].row);
  EXPECT_FALSE(charts[2].row);
}

TEST(ChartsTest, ALongLossHasItsMean) {
  std::string lines;
  for (int i = 1; i <= 200; ++i) {
    absl::StrAppend(&lines, "{\"step\": ", i, ", \"loss\": ", i % 2, "}\n");
  }
  const auto charts = ChartsOfLines(lines);
  ASSERT_THAT(charts, SizeIs(1));
  ASSERT_THAT(charts[0].lines, SizeIs(2));
  EXPECT_TRUE(charts[0].lines[0].faint);
  EXPECT_EQ(charts[0].lines[1].name, "mean of 5 steps");
  EXPECT_DOUBLE_EQ(charts[0].lines[1].y[100], 0.6);
  EXPECT_DOUBLE_EQ(charts[0].lines[1].y[101], 0.4);
}

TEST(ChartsTest, ResumesAreOnEachChart) {
  const auto charts = ChartsOfLines(
      "{\"step\": 1, \"loss\": 2, \"lr\": 1}\n{\"step\": 2, \"loss\": 2}\n"
      "{\"step\": 2, \"loss\": 2}");
  ASSERT_THAT(charts, SizeIs(2));
  for (const Chart& chart : charts) {
    ASSERT_THAT(chart.marks, SizeIs(1));
    EXPECT_EQ(chart.marks[0].x, 1);
    EXPECT_EQ(chart.marks[0].text, "resumed");
    EXPECT_EQ(chart.marks[0].title, "resumed at step 1");
  }
  EXPECT_THAT(ChartsOfLines("{\"step\": 1, \"loss\": 2}")[0].marks, IsEmpty());
  // There is no room for the words of many.
  std::string lines;
  for (int i = 2; i < 14; ++i) {
    absl::StrAppend(&lines, "{\"step\": ", i / 2, ", \"loss\": 1}\n",
                    "{\"step\": ", i / 2 + 1, ", \"loss\": 1}\n");
  }
  const auto many = ChartsOfLines(lines);
  ASSERT_GT(many[0].marks.size(), 3u);
  EXPECT_EQ(many[0].marks[0].text, "");
  EXPECT_EQ(many[0].marks[0].title, "resumed at step 1");
}

}  // namespace
}  // namespace tessera
