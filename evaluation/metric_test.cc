#include "evaluation/metric.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "base/torch_guard.h"
#include "comm/fake_communicator_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsNan;

constexpr float kInf = std::numeric_limits<float>::infinity();

// Returns the metric's value with this rank alone.
double ValueOf(Metric* metric) {
  FakeCommunicator alone;
  TESSERA_EXPECT_OK(ReduceMetrics(&alone, {metric}));
  return metric->value();
}

at::Tensor Floats(std::vector<double> values) {
  return torch::tensor(values, torch::kDouble);
}

TEST(MetricTest, AMeanIsOfAllElements) {
  Mean mean("loss");
  EXPECT_THAT(mean.value(), IsNan());
  mean.Add(torch::tensor({{1.f, 2.f}, {3.f, -4.f}}));
  mean.Add(torch::tensor(3, torch::kLong));
  mean.Add(torch::empty({0}));
  EXPECT_EQ(ValueOf(&mean), 1);
  EXPECT_EQ(mean.weight(), 5);
  mean.Reset();
  EXPECT_THAT(mean.value(), IsNan());
  EXPECT_THAT(ValueOf(&mean), IsNan());
  EXPECT_EQ(mean.weight(), 0);
}

// In float64 the sums of these depend on their order.
TEST(MetricTest, SumsAreExact) {
  const std::vector<double> values = {1e16, 1, -1e16, 1, 1e-3, -1e-3, 2};
  Mean forward("forward"), backward("backward"), in_parts("parts");
  forward.Add(Floats(values));
  backward.Add(Floats({values.rbegin(), values.rend()}));
  for (const double value : values) in_parts.Add(Floats({value}));
  const double expected = ValueOf(&forward);
  EXPECT_EQ(expected, (10000000000000004.0 - 1e16) / 7);
  EXPECT_EQ(ValueOf(&backward), expected);
  EXPECT_EQ(ValueOf(&in_parts), expected);
}

TEST(MetricTest, WeightsCountAndZeroDropsWhateverTheValueIs) {
  Mean mean("loss");
  mean.Add(torch::tensor({1.f, std::nanf(""), 4.f}),
           torch::tensor({3.f, 0.f, 1.f}));
  mean.AddMean(torch::tensor(0.5f), 4);
  EXPECT_EQ(ValueOf(&mean), 9.0 / 8);
  EXPECT_EQ(mean.weight(), 8);
  mean.Add(torch::tensor(kInf));
  EXPECT_EQ(ValueOf(&mean), kInf);
  mean.Add(torch::tensor(-kInf));
  EXPECT_THAT(ValueOf(&mean), IsNan());
}

TEST(MetricTest, WhatDoesNotFitIsRefused) {
  Mean mean("loss");
  const auto error_of = [&](auto add) { return CatchTorch("add", add); };
  EXPECT_THAT(error_of([&] { mean.Add(torch::ones({2}), torch::ones({3})); }),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("'loss'"), HasSubstr("[2] and [3]"))));
  EXPECT_THAT(
      error_of([&] { mean.Add(torch::ones({1}), -torch::ones({1})); }),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("got -1")));
  EXPECT_THAT(error_of([&] { mean.AddMean(torch::ones({2}), 2); }),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("one")));
  Accuracy accuracy;
  EXPECT_THAT(
      error_of([&] {
        accuracy.Add(torch::ones({2, 3}), torch::ones({3}, torch::kLong));
      }),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("[2, 3] and [3]")));
}

TEST(MetricTest, AccuracyCountsTheLargestLogits) {
  const at::Tensor logits =
      torch::tensor({{3.f, 2.f, 1.f}, {1.f, 3.f, 2.f}, {1.f, 2.f, 3.f}});
  Accuracy one, two("top2", 2);
  const at::Tensor labels = torch::tensor({0, 2, 0}, torch::kLong);
  one.Add(logits, labels);
  two.Add(logits, labels);
  EXPECT_EQ(one.name(), "accuracy");
  EXPECT_EQ(ValueOf(&one), 1.0 / 3);
  EXPECT_EQ(ValueOf(&two), 2.0 / 3);
  one.Add(logits.unsqueeze(0), torch::tensor({{-100, 1, -100}}, torch::kLong));
  EXPECT_EQ(ValueOf(&one), 0.5);
  EXPECT_EQ(one.weight(), 4);
}

TEST(MetricTest, PerplexityIsOfTokens) {
  // The words are equally likely.
  Perplexity perplexity;
  perplexity.AddLogits(torch::zeros({2, 3, 8}, torch::kBFloat16),
                       torch::tensor({{1, 2, 3}, {-100, 5, 7}}, torch::kLong));
  // The loss is log(8) in float32, two roundings off at most; the exponential
  // makes 8 times as much of it.
  const double ulp = 2 * std::numeric_limits<float>::epsilon();
  EXPECT_NEAR(ValueOf(&perplexity), 8, 8 * 2 * ulp);
  EXPECT_EQ(perplexity.weight(), 5);
  perplexity.Reset();
  perplexity.Add(torch::zeros({2}));
  perplexity.AddMean(torch::tensor(2.f), 2);
  EXPECT_EQ(ValueOf(&perplexity), std::exp(1.0));
}

TEST(MetricTest, AStateIsTheSumsToTheBit) {
  Mean mean("loss"), other("loss");
  mean.Add(Floats({1e300, -0.1, 1e-300}), Floats({1, 3, 0.5}));
  other.Add(Floats({5}));
  TESSERA_EXPECT_OK(other.Load(mean.State()));
  EXPECT_EQ(other.State(), mean.State());
  for (Mean* each : {&mean, &other}) each->Add(Floats({-1e300, 1e-5}));
  EXPECT_EQ(ValueOf(&other), ValueOf(&mean));
  mean.Add(Floats({kInf}));
  TESSERA_EXPECT_OK(other.Load(mean.State()));
  EXPECT_EQ(ValueOf(&other), kInf);
  for (const char* const text :
       {"", "1 2 3", "1 2 x 0", "1 2 3 8", "1 2 3 0 "}) {
    EXPECT_THAT(mean.Load(text), StatusIs(absl::StatusCode::kDataLoss)) << text;
  }
  EXPECT_EQ(ValueOf(&mean), kInf);
}

// The other rank's part is made by hand.
TEST(MetricTest, AllRanksAreAddedUpOnce) {
  Mean mine("loss"), theirs("loss"), accuracy("accuracy");
  mine.Add(Floats({1, 2}));
  theirs.Add(Floats({9}));
  const std::string state = theirs.State(), none = accuracy.State();
  FakeCommunicator two(0, 2);
  two.texts = [&](const std::string& text) {
    const bool sums = text == mine.State() + "\n" + none;
    return std::vector<std::string>{text, sums ? state + "\n" + none : text};
  };
  for (int again = 0; again < 2; ++again) {
    TESSERA_ASSERT_OK(ReduceMetrics(&two, {&mine, &accuracy}));
    EXPECT_EQ(mine.value(), 4);
    EXPECT_EQ(mine.weight(), 3);
    EXPECT_THAT(accuracy.value(), IsNan());
  }
}

}  // namespace
}  // namespace tessera
