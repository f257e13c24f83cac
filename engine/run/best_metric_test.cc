#include "engine/run/best_metric.h"

#include <limits>
#include <string>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(BestMetricTest, TheSmallestIsTheBest) {
  BestMetric best({});
  EXPECT_FALSE(best.any());
  EXPECT_TRUE(best.Report(2, 10));
  EXPECT_FALSE(best.Report(2, 20));
  EXPECT_FALSE(best.Report(3, 30));
  EXPECT_EQ(best.not_better(), 2);
  EXPECT_TRUE(best.Report(1.5, 40));
  EXPECT_EQ(best.not_better(), 0);
  EXPECT_EQ(best.value(), 1.5);
  EXPECT_EQ(best.step(), 40);
}

TEST(BestMetricTest, OrTheLargestBySoMuch) {
  BestMetricOptions options;
  options.larger_is_better = true;
  options.min_delta = 0.25;
  BestMetric best(options);
  EXPECT_TRUE(best.Report(-1, 1));
  EXPECT_FALSE(best.Report(-0.75, 2));
  EXPECT_TRUE(best.Report(-0.5, 3));
  EXPECT_FALSE(best.Report(-2, 4));
  EXPECT_EQ(best.value(), -0.5);
}

TEST(BestMetricTest, NanIsNeverTheBest) {
  BestMetric best({});
  EXPECT_FALSE(best.Report(kNan, 1));
  EXPECT_FALSE(best.any());
  EXPECT_EQ(best.not_better(), 1);
  EXPECT_TRUE(best.Report(kInf, 2));
  EXPECT_TRUE(best.Report(5, 3));
  EXPECT_FALSE(best.Report(kNan, 4));
  EXPECT_EQ(best.value(), 5);
}

TEST(BestMetricTest, AStateIsAllOfIt) {
  BestMetric best({}), other({});
  EXPECT_EQ(best.State(), "");
  for (const double metric : {kNan, 0.1, kNan, 0.2}) {
    best.Report(metric, 7);
    TESSERA_EXPECT_OK(other.Load(best.State()));
    EXPECT_EQ(other.any(), best.any());
    EXPECT_EQ(other.value(), best.value());
    EXPECT_EQ(other.step(), best.step());
    EXPECT_EQ(other.not_better(), best.not_better());
  }
  for (const std::string text :
       {"best", "best=1 step=2", "best=1 step=2 not_better=-1",
        "best=nan step=2 not_better=0", "best=1 step=x not_better=0"}) {
    EXPECT_THAT(other.Load(text), StatusIs(absl::StatusCode::kDataLoss,
                                           HasSubstr("'" + text + "'")));
  }
  EXPECT_EQ(other.State(), best.State());
  TESSERA_EXPECT_OK(other.Load(""));
  EXPECT_EQ(other.State(), "");
}

}  // namespace
}  // namespace tessera
