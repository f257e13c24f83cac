#include "monitor/histogram.h"

#include <cmath>
#include <limits>

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

TEST(HistogramTest, TheWidestRange) {
  constexpr double kMost = std::numeric_limits<double>::max();
  const Histogram h = HistogramOf({-kMost, 0, kMost}, 2);
  EXPECT_THAT(h.limits, ElementsAre(0, kMost));
  EXPECT_THAT(h.counts, ElementsAre(2, 1));
}

}  // namespace
}  // namespace tessera
