#include "report/svg_chart.h"

#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(SvgChartTest, NumbersAreShort) {
  const std::pair<double, const char*> plain[] = {{0, "0"},
                                                  {1, "1"},
                                                  {12.34567, "12.35"},
                                                  {0.5, "0.5"},
                                                  {1234.56, "1234.6"},
                                                  {23456, "23.5k"},
                                                  {1.5e9, "1.5G"},
                                                  {0.0003, "3e-04"},
                                                  {-2.5, "-2.5"},
                                                  {1e20, "1e+20"},
                                                  {kNaN, "NaN"},
                                                  {-kInf, "-infinite"}};
  for (const auto& [value, text] : plain)
    EXPECT_EQ(ShortNumber(value, ""), text);
  EXPECT_EQ(ShortNumber(0, "bytes"), "0 B");
  EXPECT_EQ(ShortNumber(1536, "bytes"), "1.5 KiB");
  EXPECT_EQ(ShortNumber(3.25 * 1024 * 1024 * 1024, "bytes"), "3.25 GiB");
}

TEST(SvgChartTest, TicksAreRound) {
  EXPECT_THAT(NiceTicks(0, 10, 5), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(NiceTicks(-1, 1, 4), ElementsAre(-1, -0.5, 0, 0.5, 1));
  EXPECT_TRUE(NiceTicks(3, 3, 5).empty());
}

TEST(SvgChartTest, TextIsEscapedAndXml) {
  EXPECT_EQ(EscapeHtml("<a href='x'>&\""),
            "&lt;a href=&#39;x&#39;&gt;&amp;&quot;");
  EXPECT_EQ(EscapeHtml(std::string("a\0b\x1b", 4)),
            "a\xEF\xBF\xBD"
            "b\xEF\xBF\xBD");
  EXPECT_EQ(EscapeHtml("\xC3\xA4\xFF"), "\xC3\xA4\xEF\xBF\xBD");
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
  EXPECT_THAT(point, HasSubstr("<circle"));
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
  const std::string svg = ChartToSvg(chart);
  size_t lines = 0;
  for (size_t at = svg.find("<polyline"); at != svg.npos;
       at = svg.find("<polyline", at + 1)) {
    ++lines;
  }
  EXPECT_EQ(lines, 2u);
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
  EXPECT_LT(svg.size(), 25000u);
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

}  // namespace
}  // namespace tessera
