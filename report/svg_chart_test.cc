#include "report/svg_chart.h"

#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

int CountOf(const std::string& text, const std::string& what) {
  int count = 0;
  for (size_t at = text.find(what); at != text.npos;
       at = text.find(what, at + 1)) {
    ++count;
  }
  return count;
}

Chart TwoPoints(double a, double b) {
  Chart chart;
  chart.title = "t";
  chart.x = {1, 2};
  chart.lines = {{"line", {a, b}}};
  return chart;
}

TEST(SvgChartTest, NothingToDrawIsNoChart) {
  EXPECT_EQ(ChartToSvg(TwoPoints(kNaN, kInf)), "");
  EXPECT_EQ(ChartToSvg(Chart()), "");
  // One point, and one value, have an axis, too.
  const std::string point = ChartToSvg(TwoPoints(kNaN, 3));
  EXPECT_THAT(point, HasSubstr("class=\"p s0\" d=\"M1000.0 "));
  const std::string flat = ChartToSvg(TwoPoints(3, 3));
  EXPECT_THAT(flat, HasSubstr("<polyline"));
  for (const std::string& svg : {point, flat}) {
    EXPECT_THAT(svg, Not(HasSubstr("nan")));
    EXPECT_THAT(svg, Not(HasSubstr("inf")));
  }
}

TEST(SvgChartTest, AGapEndsALine) {
  Chart chart;
  chart.x = {1, 2, 3, 4, 5};
  chart.lines = {{"line", {1, 2, kNaN, 3, 4}}};
  EXPECT_EQ(CountOf(ChartToSvg(chart), "<polyline"), 2);
}

// Ten thousand points are some thousand in the file, and the spike stays.
TEST(SvgChartTest, ManyPointsKeepTheirExtremes) {
  Chart chart;
  ChartLine line = {"line", {}};
  for (int i = 0; i < 10000; ++i) {
    chart.x.push_back(i);
    line.y.push_back(i == 4321 ? 100 : i == 6789 ? -50 : i % 2);
  }
  chart.lines = {line};
  const std::string svg = ChartToSvg(chart);
  EXPECT_LT(svg.size(), 60000u);
  Chart few;
  few.x = {0, 4321, 6789, 9999};
  few.lines = {{"line", {0, 100, -50, 1}}};
  // The axis is the same, and so are the heights of both.
  const auto height_of = [](const std::string& text, size_t from) {
    const size_t comma = text.find(',', from);
    return text.substr(comma + 1, text.find(' ', comma) - comma - 1);
  };
  const std::string sparse = ChartToSvg(few);
  const size_t points = sparse.find("points=\"") + 8;
  const std::string top = height_of(sparse, sparse.find(' ', points));
  EXPECT_THAT(svg, HasSubstr("," + top + " "));
  // What a reader points at has both ends of what it stands for.
  EXPECT_THAT(svg, HasSubstr("line: 0 to 100</title>"));
  EXPECT_THAT(svg, HasSubstr("<title>steps 0 to 41\nline: 0 to 1</title>"));
}

TEST(SvgChartTest, EachStepTellsItsValues) {
  Chart chart;
  chart.x = {1000, 1001, 1001, 1002};
  chart.unit = "ms";
  chart.lines = {{"a", {1.23456, 2, 3, 4}}, {"b", {9, kNaN, kNaN, 8}}};
  const std::string svg = ChartToSvg(chart);
  EXPECT_THAT(svg,
              HasSubstr("<title>step 1,000\na: 1.2346 ms\nb: 9 ms</title>"));
  EXPECT_THAT(svg, HasSubstr("<title>step 1,001\na: 2 ms to 3 ms</title>"));
  EXPECT_EQ(CountOf(svg, "<rect"), 3);
}

TEST(SvgChartTest, AxesSayWhatTheyShow) {
  Chart chart = TwoPoints(1, 1000);
  EXPECT_THAT(ChartToSvg(chart), HasSubstr("class=\"yl\">t</span>"));
  chart.log_scale = true;
  EXPECT_THAT(ChartToSvg(chart), HasSubstr("class=\"yl\">t, log scale</span>"));
  chart.unit = "ms";
  EXPECT_THAT(ChartToSvg(chart),
              HasSubstr("class=\"yl\">ms, log scale</span>"));
  EXPECT_THAT(ChartToSvg(chart), HasSubstr("class=\"xl\">step</span>"));
  // A log axis has no 0.
  chart.lines[0].y[0] = 0;
  EXPECT_THAT(ChartToSvg(chart), HasSubstr("class=\"yl\">ms</span>"));
}

TEST(SvgChartTest, TheLastAndTheLowestAreMarked) {
  Chart chart;
  chart.x = {1, 2, 3};
  chart.lines = {{"line", {3, 1, 2}}};
  EXPECT_THAT(ChartToSvg(chart), HasSubstr("line: <b>2</b> last</li>"));
  EXPECT_THAT(ChartToSvg(chart), Not(HasSubstr("hole")));
  chart.lowest = true;
  const std::string svg = ChartToSvg(chart);
  EXPECT_THAT(svg,
              HasSubstr("line: <b>2</b> last, <b>1</b> lowest (step 2)</li>"));
  EXPECT_THAT(svg, HasSubstr("\"p s0 big best\" d=\"M500.0 "));
}

// No curve hides another, and the legend has no colour that is not there.
TEST(SvgChartTest, EqualCurvesAreOne) {
  Chart chart;
  chart.x = {1, 2};
  chart.lines = {{"a", {1, 2}},
                 {"b", {1, 2}},
                 {"unseen", {kNaN, kNaN}},
                 {"c", {1, 2.001}},
                 {"d", {1, 1.5}}};
  const std::string svg = ChartToSvg(chart);
  EXPECT_EQ(CountOf(svg, "<polyline"), 2);
  EXPECT_THAT(svg, HasSubstr("data-series=\"a = b \xE2\x89\x88 c\""));
  EXPECT_EQ(CountOf(svg, "<li>"), 2);
  EXPECT_THAT(svg, Not(HasSubstr("unseen")));
  // Those that are nearly equal tell their own values.
  EXPECT_THAT(svg, HasSubstr("\na = b: 2\nc: 2.001\nd: 1.5</title>"));
}

TEST(SvgChartTest, EvaluationsAreJoined) {
  Chart chart;
  chart.x = {1, 2, 3, 4, 5};
  chart.lines = {{"loss", {5, 4, 3, 2, 1}},
                 {"eval", {kNaN, 4.5, kNaN, 2.5, kNaN}}};
  const std::string svg = ChartToSvg(chart);
  EXPECT_EQ(CountOf(svg, "<polyline"), 2);
  // A line, and a dot at each of its points.
  const size_t eval = svg.find("data-series=\"eval\"");
  const std::string drawn = svg.substr(eval, svg.find("</g>", eval) - eval);
  EXPECT_THAT(drawn, HasSubstr("points=\"250.0,"));
  EXPECT_EQ(CountOf(drawn, "h.01"), 2);
}

TEST(SvgChartTest, ResumesAreMarked) {
  Chart chart;
  chart.x = {1, 2, 3, 4, 5};
  chart.lines = {{"line", {1, 2, 3, 4, 5}}};
  chart.marks = {{3, "3 ranks", "resumed at step 3"},
                 {3.1, "near", "close by"},
                 {9, "out", "not there"}};
  const std::string svg = ChartToSvg(chart);
  EXPECT_THAT(svg, HasSubstr("<path class=\"cut\" d=\"M500.0 0V250\">"
                             "<title>resumed at step 3</title>"));
  EXPECT_THAT(svg, HasSubstr("style=\"left:50.00%\">3 ranks</span>"));
  // Its text would lie on the other.
  EXPECT_EQ(CountOf(svg, "class=\"cut\""), 2);
  EXPECT_THAT(svg, Not(HasSubstr("near</span>")));
  EXPECT_THAT(svg, HasSubstr("<title>step 4, resumed at step 3, close by\n"));
}

TEST(SvgChartTest, StacksLieOnEachOther) {
  Chart chart;
  chart.x = {1, 2};
  chart.stacked = true;
  chart.lines = {{"below", {1, 1}}, {"above", {1, 3}}};
  const std::string svg = ChartToSvg(chart);
  EXPECT_LT(svg.find("data-series=\"above\""),
            svg.find("data-series=\"below\""));
  EXPECT_THAT(svg, HasSubstr(">4<"));  // the axis goes up to the sum
}

// A line over a stack is no part of it.
TEST(SvgChartTest, ALineOverAStack) {
  Chart chart;
  chart.x = {1, 2};
  chart.stacked = true;
  chart.lines = {{"below", {1, 1}}, {"peak", {2, 2}}, {"above", {1, 3}}};
  chart.lines[1].over = true;
  const std::string svg = ChartToSvg(chart);
  EXPECT_EQ(CountOf(svg, "<polygon"), 2);
  EXPECT_THAT(svg, HasSubstr("<polyline class=\"over\""));
  EXPECT_LT(svg.find("data-series=\"below\""),
            svg.find("data-series=\"peak\""));
  EXPECT_THAT(svg, Not(HasSubstr(">5<")));
}

}  // namespace
}  // namespace tessera
