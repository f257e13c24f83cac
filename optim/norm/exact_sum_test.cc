#include "optim/norm/exact_sum.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

constexpr double kMax = std::numeric_limits<double>::max();
constexpr double kTiny = std::numeric_limits<double>::denorm_min();

ExactSum Sum(const std::vector<double>& values) {
  ExactSum sum;
  for (const double value : values) sum.Add(value);
  return sum;
}
double Rounded(const std::vector<double>& values) {
  return Sum(values).Round();
}

// Another way to the nearest double of a sum: Shewchuk, "Adaptive Precision
// Floating-Point Arithmetic", 1997. The partials do not overlap, smallest
// first.
double ShewchukSum(const std::vector<double>& values) {
  std::vector<double> partials;
  for (double x : values) {
    size_t kept = 0;
    for (double y : partials) {
      if (x < y) std::swap(x, y);
      const double high = x + y;
      const double low = y - (high - x);
      if (low != 0) partials[kept++] = low;
      x = high;
    }
    partials.resize(kept);
    partials.push_back(x);
  }
  double high = 0, low = 0;
  while (!partials.empty() && low == 0) {
    const double x = high, y = partials.back();
    partials.pop_back();
    high = x + y;
    low = y - (high - x);
  }
  // Halfway between two doubles, plus a rest of low's sign.
  if (!partials.empty() && (low > 0) == (partials.back() > 0)) {
    const double doubled = 2 * low, next = high + doubled;
    if (next - high == doubled) high = next;
  }
  return high;
}

std::vector<double> RandomValues(int count, int min_exponent, int max_exponent,
                                 std::mt19937_64* random) {
  std::uniform_int_distribution<int> exponent(min_exponent, max_exponent);
  // Few mantissa bits make sums that are halfway between doubles likely.
  std::uniform_int_distribution<int> bits(1, 53);
  std::vector<double> values;
  for (int i = 0; i < count; ++i) {
    const uint64_t mantissa = (*random)() >> (64 - bits(*random));
    values.push_back(
        std::ldexp(static_cast<double>(mantissa), exponent(*random)));
  }
  return values;
}

TEST(ExactSum, IsShewchuksSum) {
  std::mt19937_64 random(1);
  const std::vector<std::pair<int, int>> exponents = {
      {-1074, 900}, {-1074, -1000}, {-60, 0}, {-300, -100}, {0, 2}};
  for (int i = 0; i < 20000; ++i) {
    const auto [min, max] = exponents[i % exponents.size()];
    const std::vector<double> values =
        RandomValues(1 + i % 40, min, max, &random);
    ASSERT_EQ(Rounded(values), ShewchukSum(values)) << "case " << i;
  }
}

TEST(ExactSum, OrderAndGroupsDoNotMatter) {
  std::mt19937_64 random(2);
  std::vector<double> values = RandomValues(500, -1074, 900, &random);
  const std::string text = Sum(values).Text();
  for (int i = 0; i < 50; ++i) {
    std::shuffle(values.begin(), values.end(), random);
    ExactSum sums[3];
    for (const double value : values) sums[random() % 3].Add(value);
    sums[2].Add(sums[0]);
    sums[1].Add(sums[2]);
    ASSERT_EQ(sums[1].Text(), text);
  }
}

TEST(ExactSum, RoundsToNearestEven) {
  const double half = 0x1p-53;  // of 1's last bit
  EXPECT_EQ(Rounded({1, half}), 1);
  EXPECT_EQ(Rounded({1, half, kTiny}), 1 + 2 * half);
  EXPECT_EQ(Rounded({1 + 2 * half, half}), 1 + 4 * half);
  EXPECT_EQ(Rounded({2 - 2 * half, half}), 2);
  EXPECT_EQ(Rounded({2 - 2 * half, half / 2, half / 4}), 2 - 2 * half);
}

TEST(ExactSum, EndsOfTheRange) {
  EXPECT_EQ(ExactSum().Round(), 0);
  EXPECT_FALSE(std::signbit(ExactSum().Round()));
  EXPECT_EQ(Rounded({0, 0}), 0);
  EXPECT_EQ(Rounded({kTiny}), kTiny);
  EXPECT_EQ(Rounded({kTiny, kTiny, kTiny}), 3 * kTiny);
  EXPECT_EQ(Rounded({0x1p-1022, kTiny}), 0x1.0000000000001p-1022);
  EXPECT_EQ(Rounded({0x0.fffffffffffffp-1022, kTiny}), 0x1p-1022);
  EXPECT_EQ(Rounded({kMax}), kMax);
  EXPECT_EQ(Rounded({kMax, kTiny}), kMax);
  EXPECT_EQ(Rounded({kMax, 0x1.fffffffffffffp+969}), kMax);
  EXPECT_EQ(Rounded({kMax, 0x1p+970}), HUGE_VAL);
  EXPECT_EQ(Rounded({kMax, kMax, kMax}), HUGE_VAL);
}

// Digits would overflow without carries.
TEST(ExactSum, ManyAddends) {
  const double ones = 0x1.fffffffffffffp+0;
  ExactSum sum = Sum({ones, kTiny});
  for (int i = 0; i < 70; ++i) {
    const ExactSum same = sum;
    sum.Add(same);
  }
  EXPECT_EQ(sum.Round(), ones * 0x1p70);
  EXPECT_EQ(sum.Text(), "1fffffffffffff" + std::string(255, '0') + "4" +
                            std::string(17, '0'));
  for (int i = 0; i < 1000; ++i) sum.Add(ones * 0x1p70);
  EXPECT_EQ(sum.Round(), ones * 1001 * 0x1p70);
}

TEST(ExactSum, TextIsTheNumberInUnitsOfTheSmallest) {
  EXPECT_EQ(ExactSum().Text(), "0");
  EXPECT_EQ(Sum({kTiny}).Text(), "1");
  EXPECT_EQ(Sum({kTiny * 0xabc, kTiny * 0x100000000}).Text(), "100000abc");
  EXPECT_EQ(Sum({0x1p-1022}).Text(), "1" + std::string(13, '0'));
  EXPECT_EQ(Sum({0x1p-2}).Text(), "1" + std::string(268, '0'));
}

TEST(ExactSum, ReadsItsText) {
  std::mt19937_64 random(3);
  for (const auto& values : std::vector<std::vector<double>>{
           {},
           {kTiny},
           {kMax, kMax, kMax, kTiny},
           RandomValues(50, -1074, 900, &random)}) {
    const ExactSum sum = Sum(values);
    TESSERA_ASSERT_OK_AND_ASSIGN(ExactSum read, ExactSum::Parse(sum.Text()));
    EXPECT_EQ(read.Text(), sum.Text());
    EXPECT_EQ(read.Round(), sum.Round());
    read.Add(1);
    ExactSum more = sum;
    more.Add(1);
    EXPECT_EQ(read.Text(), more.Text());
  }
}

TEST(ExactSum, RefusesOtherText) {
  for (const std::string& text :
       {std::string(), std::string("00"), std::string("01"), std::string("-1"),
        std::string("1 "), std::string("1g"), std::string("1A"),
        std::string("1/"), std::string(545, '1')}) {
    EXPECT_THAT(ExactSum::Parse(text),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("got '" + text + "'")));
  }
  TESSERA_EXPECT_OK(ExactSum::Parse(std::string(544, 'f')));
}

}  // namespace
}  // namespace tessera
