#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "base/page/page_numbers.h"
#include "base/page/page_style.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(PageNumbersTest, NumbersHaveThreeDigits) {
  const std::pair<double, const char*> plain[] = {{0, "0"},
                                                  {1, "1"},
                                                  {12.34567, "12.3"},
                                                  {0.5, "0.5"},
                                                  {0.0123456, "0.0123"},
                                                  {3.508, "3.51"},
                                                  {999.6, "1,000"},
                                                  {1234.56, "1,230"},
                                                  {23456, "23,500"},
                                                  {-23456, "-23,500"},
                                                  {1234567, "1.23M"},
                                                  {1.5e9, "1.5G"},
                                                  {0.0003, "3e-4"},
                                                  {-2.5, "-2.5"},
                                                  {1e20, "1e20"},
                                                  {kNaN, "NaN"},
                                                  {-kInf, "-infinite"}};
  for (const auto& [value, text] : plain)
    EXPECT_EQ(ShortNumber(value, ""), text);
  EXPECT_EQ(ShortNumber(0, "bytes"), "0 B");
  EXPECT_EQ(ShortNumber(1536, "bytes"), "1.5 KiB");
  EXPECT_EQ(ShortNumber(3.25 * 1024 * 1024 * 1024, "bytes"), "3.25 GiB");
  EXPECT_EQ(ShortNumber(1234.567, "", 6), "1,234.57");
  EXPECT_EQ(ShortNumber(2.34567, "", 5), "2.3457");
}

TEST(PageNumbersTest, QuantitiesHaveTheirUnit) {
  EXPECT_EQ(Quantity(385.42, "ms"), "385 ms");
  EXPECT_EQ(Quantity(0.042, "ms"), "0.042 ms");
  EXPECT_EQ(Quantity(1500, "ms"), "1,500 ms");
  EXPECT_EQ(Quantity(856000, "ms"), "14 min 16 s");
  EXPECT_EQ(Quantity(2048, "bytes"), "2 KiB");
  EXPECT_EQ(Quantity(7, ""), "7");
  EXPECT_EQ(Quantity(kNaN, "ms"), "NaN ms");
}

TEST(PageNumbersTest, Durations) {
  EXPECT_EQ(DurationText(0.25), "0.25 s");
  EXPECT_EQ(DurationText(45.4), "45 s");
  EXPECT_EQ(DurationText(59.7), "1 min");
  EXPECT_EQ(DurationText(725), "12 min 5 s");
  EXPECT_EQ(DurationText(3 * 3600 + 12 * 60 + 59), "3 h 12 min");
  EXPECT_EQ(DurationText(2 * 86400 + 5 * 3600), "2 d 5 h");
}

TEST(PageNumbersTest, CountsHaveSeparators) {
  EXPECT_EQ(CountText(0), "0");
  EXPECT_EQ(CountText(999), "999");
  EXPECT_EQ(CountText(1000), "1,000");
  EXPECT_EQ(CountText(-1234567), "-1,234,567");
  EXPECT_EQ(CountText(-123), "-123");
  EXPECT_EQ(CountText(std::numeric_limits<int64_t>::min()),
            "-9,223,372,036,854,775,808");
}

TEST(PageNumbersTest, TicksAreRound) {
  EXPECT_THAT(NiceTicks(0, 10, 5), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(NiceTicks(-1, 1, 4), ElementsAre(-1, -0.5, 0, 0.5, 1));
  EXPECT_TRUE(NiceTicks(3, 3, 5).empty());
}

// Three digits would make them equal.
TEST(PageNumbersTest, TicksCanBeToldApart) {
  EXPECT_THAT(TickTexts({2.7812, 2.7814}, ""), ElementsAre("2.7812", "2.7814"));
  EXPECT_THAT(TickTexts({12340, 12345}, ""), ElementsAre("12,340", "12,345"));
  EXPECT_THAT(TickTexts({0, 500, 1000}, ""), ElementsAre("0", "500", "1,000"));
  EXPECT_THAT(TickTexts({0.001, 1, 1000}, ""),
              ElementsAre("0.001", "1", "1,000"));
}

TEST(PageStyleTest, KindsOfMemoryHaveColorsOfTheirOwn) {
  EXPECT_EQ(MemoryKindColor("parameters"), 0);
  EXPECT_NE(MemoryKindColor("activations"), MemoryKindColor("parameters"));
  EXPECT_EQ(MemoryKindColor("unheard of"), MemoryKindColor("other"));
}

}  // namespace
}  // namespace tessera
