#include "sharding/gradient/gradient_forecast.h"

#include <vector>

#include "gtest/gtest.h"

namespace tessera {
namespace {

constexpr int64_t kBytes = 1 << 20;
constexpr int kNone = GradientForecast::kNone;

class GradientForecastTest : public ::testing::Test {
 protected:
  // A backward whose k-th allocation becomes parameters[k]; what was forecast.
  std::vector<int> Backward(const std::vector<int>& parameters) {
    std::vector<int> forecast;
    forecast_.Begin();
    for (size_t k = 0; k < parameters.size(); ++k) {
      forecast.push_back(forecast_.Next(kBytes));
      forecast_.Lies(kBytes, &places_[k]);
    }
    for (size_t k = 0; k < parameters.size(); ++k) {
      if (parameters[k] != kNone)
        forecast_.Became(&places_[k], kBytes, parameters[k]);
    }
    forecast_.End();
    return forecast;
  }
  using Parameters = std::vector<int>;
  GradientForecast forecast_{{kBytes, 2 * kBytes}};
  char places_[8];
};

TEST_F(GradientForecastTest, FollowsItsSizesAlone) {
  EXPECT_TRUE(forecast_.Follows(kBytes));
  EXPECT_FALSE(forecast_.Follows(kBytes + 1));
}

TEST_F(GradientForecastTest, BelievesWhatTwoBackwardsAgreeAbout) {
  const Parameters parameters = {kNone, 4, kNone, 2};
  const Parameters unknown(4, kNone);
  EXPECT_EQ(Backward(parameters), unknown);
  EXPECT_EQ(Backward(parameters), unknown);
  EXPECT_EQ(Backward(parameters), parameters);
  // One that differs, once: known is again what both have.
  EXPECT_EQ(Backward({kNone, 4, 2, kNone}), parameters);
  EXPECT_EQ(Backward(parameters), Parameters({kNone, 4, kNone, kNone}));
  EXPECT_EQ(Backward(parameters), Parameters({kNone, 4, kNone, kNone}));
  EXPECT_EQ(Backward(parameters), parameters);
}

TEST_F(GradientForecastTest, KnowsNothingBeyondAShorterBackward) {
  Backward({1, 2, 3});
  Backward({1, 2});
  EXPECT_EQ(Backward({1, 2, 3}), Parameters({1, 2, kNone}));
}

TEST_F(GradientForecastTest, AnAddressIsThatOfTheLastAllocation) {
  for (int i = 0; i < 3; ++i) {
    forecast_.Begin();
    const int first = forecast_.Next(kBytes);
    forecast_.Lies(kBytes, &places_[0]);  // and is freed
    const int second = forecast_.Next(kBytes);
    forecast_.Lies(kBytes, &places_[0]);
    forecast_.Became(&places_[0], kBytes, 7);
    forecast_.End();
    EXPECT_EQ(first, kNone);
    EXPECT_EQ(second, i < 2 ? kNone : 7);
  }
}

TEST_F(GradientForecastTest, AnotherSizeIsAnotherAllocation) {
  for (int i = 0; i < 3; ++i) {
    forecast_.Begin();
    EXPECT_EQ(forecast_.Next(2 * kBytes), kNone);
    forecast_.Lies(2 * kBytes, &places_[0]);  // and is freed
    // What lies there now was allocated without being followed.
    forecast_.Became(&places_[0], kBytes, 7);
    forecast_.End();
  }
}

TEST_F(GradientForecastTest, CountsEachSizeByItself) {
  for (int i = 0; i < 3; ++i) {
    forecast_.Begin();
    for (int k = 0; k < i; ++k) {  // another number of these each time
      EXPECT_EQ(forecast_.Next(2 * kBytes), kNone);
      forecast_.Lies(2 * kBytes, &places_[1]);
    }
    EXPECT_EQ(forecast_.Next(kBytes), i < 2 ? kNone : 5);
    forecast_.Lies(kBytes, &places_[0]);
    forecast_.Became(&places_[0], kBytes, 5);
    forecast_.Became(&places_[2], kBytes,
                     6);  // of no allocation that was followed
    forecast_.End();
  }
}

}  // namespace
}  // namespace tessera
