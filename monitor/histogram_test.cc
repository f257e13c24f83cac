#include "monitor/histogram.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(HistogramTest, CountsWhatIsUpToEachLimit) {
  const Histogram h = HistogramOf({0, 1, 2, 4, 8, 8}, 4);
  EXPECT_THAT(h.limits, ElementsAre(2, 4, 6, 8));
  EXPECT_THAT(h.counts, ElementsAre(3, 1, 0, 2));
  EXPECT_EQ(h.min, 0);
  EXPECT_EQ(h.max, 8);
  EXPECT_EQ(h.sum, 23);
  EXPECT_EQ(h.sum_squares, 149);
  EXPECT_EQ(h.count, 6);
}

TEST(HistogramTest, EqualValuesAreOneBucket) {
  const Histogram h = HistogramOf({3, 3}, 4);
  EXPECT_THAT(h.limits, ElementsAre(3));
  EXPECT_THAT(h.counts, ElementsAre(2));
}

TEST(HistogramTest, WhatIsNotFiniteIsCountedApart) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const Histogram h = HistogramOf({std::nan(""), 1, -kInf, kInf}, 2);
  EXPECT_EQ(h.count, 1);
  EXPECT_EQ(h.not_finite, 3);
  EXPECT_THAT(h.counts, ElementsAre(1));
  EXPECT_THAT(HistogramOf({kInf}).limits, IsEmpty());
  EXPECT_THAT(HistogramOf({}).limits, IsEmpty());
}

// Also where roundings decide: limits that are values.
TEST(HistogramTest, PartsAreTheWhole) {
  std::vector<double> values;
  for (int i = 0; i < 1000; ++i) values.push_back(std::sin(i * i) * i);
  values.push_back(std::nan(""));
  const double lowest = *std::min_element(values.begin(), values.end() - 1);
  const double highest = *std::max_element(values.begin(), values.end() - 1);
  for (int i = 0; i <= 64; ++i) {
    values.push_back(lowest + i * ((highest - lowest) / 64));
  }
  std::vector<int64_t> counted;
  const Histogram whole = HistogramOf(values);
  for (size_t i = 0; i < whole.limits.size(); ++i) {
    counted.push_back(
        std::count_if(values.begin(), values.end(), [&](double value) {
          return value <= whole.limits[i] &&
                 (i == 0 || value > whole.limits[i - 1]);
        }));
  }
  EXPECT_EQ(whole.counts, counted);

  const auto parts = {absl::MakeConstSpan(values).subspan(0, 1),
                      absl::MakeConstSpan(values).subspan(1, 700),
                      absl::MakeConstSpan(values).subspan(701)};
  HistogramRange range;
  for (const auto part : parts) {
    HistogramRange own;
    own.Add(part);
    range.Merge(own);
  }
  range.Merge(HistogramRange());  // a rank that has nothing
  Histogram made = EmptyHistogram(range);
  for (const auto part : parts) CountInto(part, &made);
  EXPECT_EQ(made.limits, whole.limits);
  EXPECT_EQ(made.counts, whole.counts);
  EXPECT_EQ(made.count, whole.count);
  EXPECT_EQ(made.not_finite, 1);
}

TEST(HistogramTest, TheWidestRange) {
  constexpr double kMost = std::numeric_limits<double>::max();
  const Histogram h = HistogramOf({-kMost, 0, kMost}, 2);
  EXPECT_THAT(h.limits, ElementsAre(0, kMost));
  EXPECT_THAT(h.counts, ElementsAre(2, 1));
}

}  // namespace
}  // namespace tessera
