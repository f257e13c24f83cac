// Tests the parts of the oracle: exact sums, norms and the loss scale, against
// cases worked out by hand.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "verify/oracle_norm.h"
#include "verify/oracle_scale.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");

// ---- ExactSum

TEST(ExactSum, KeepsWhatPlainSumsLose) {
  const double large = std::ldexp(1, 54);  // its neighbour is 4 away
  EXPECT_EQ(ExactSum({}), 0);
  EXPECT_EQ(ExactSum({large, 1, 1, 1}), large + 4);
  EXPECT_EQ(ExactSum({1, 1, large, 1}), large + 4);
  EXPECT_EQ(ExactSum({1, 1, 1, large}), large + 4);
}

TEST(ExactSum, TiesGoToEvenUnlessAnythingFollows) {
  const double ulp = std::ldexp(1, -52);
  EXPECT_EQ(ExactSum({1, ulp / 2}), 1);
  EXPECT_EQ(ExactSum({1 + ulp, ulp / 2}), 1 + 2 * ulp);
  EXPECT_EQ(ExactSum({1, ulp / 2, std::ldexp(1, -300)}), 1 + ulp);
  EXPECT_EQ(ExactSum({1, ulp / 4, ulp / 4, std::ldexp(1, -300)}), 1 + ulp);
}

TEST(ExactSum, OfInfinitiesAndNans) {
  EXPECT_EQ(ExactSum({1, kInf, 1}), kInf);
  EXPECT_TRUE(std::isnan(ExactSum({kInf, kNan, 1})));
  const double max = std::numeric_limits<double>::max();
  EXPECT_EQ(ExactSum({max, max}), kInf);
}

TEST(ExactSum, IsThatOfIntegersOf128Bits) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 1000; ++round) {
    std::vector<double> values;
    unsigned __int128 sum = 0;
    for (int i = 0; i < 40; ++i) {
      const uint64_t mantissa = random() >> (11 + random() % 53);
      const int exponent = static_cast<int>(random() % 60);
      values.push_back(std::ldexp(static_cast<double>(mantissa), exponent));
      sum += static_cast<unsigned __int128>(mantissa) << exponent;
    }
    ASSERT_EQ(ExactSum(values), static_cast<double>(sum)) << "round " << round;
  }
}

// ---- OracleNorm

PlacedGradient Placed(const std::vector<double>& values, int64_t offset = 0) {
  return {torch::tensor(values, torch::kDouble), {1}, offset};
}

// Zeros at storage places 0 to `end`, except for what is given.
PlacedGradient Sparse(int64_t end, const std::map<int64_t, double>& values) {
  std::vector<double> all(static_cast<size_t>(end));
  for (const auto& [at, value] : values) all[at] = value;
  return Placed(all);
}

TEST(OracleNorm, OfEachKind) {
  const std::vector<PlacedGradient> two = {Placed({3}), Placed({0, -4})};
  EXPECT_EQ(OracleNorm(two, 2), 5);
  EXPECT_EQ(OracleNorm(two, 1), 7);
  EXPECT_EQ(OracleNorm(two, kInf), 4);
  EXPECT_EQ(OracleNorm(two, 3), std::pow(91.0, 1.0 / 3));
  EXPECT_EQ(OracleNorm({}, 2), 0);
}

TEST(OracleNorm, OfWhatIsNotFinite) {
  for (double p : {1.0, 2.0, 3.0, kInf}) {
    EXPECT_EQ(OracleNorm({Placed({1, -kInf})}, p), kInf);
    EXPECT_TRUE(std::isnan(OracleNorm({Placed({kInf, kNan, 1})}, p)));
    EXPECT_TRUE(std::isnan(OracleNorm({Placed({kNan}), Placed({kInf})}, p)));
  }
}

TEST(OracleClipping, IsThatOfTorch) {
  for (const double most : {0.5, 5.0}) {
    const at::Tensor p = torch::zeros({4}, torch::requires_grad());
    p.mutable_grad() = torch::tensor({3.0F, 0.0F, -4.0F, 0.25F});
    const at::Tensor before = p.grad().clone();
    const double norm = torch::nn::utils::clip_grad_norm_({p}, most);
    const double factor = OracleClipping(norm, most);
    EXPECT_TRUE(at::allclose(p.grad(), before * factor, 1e-5));
    EXPECT_EQ(factor < 1, most < norm);
    p.mutable_grad() = before.clone();
    torch::nn::utils::clip_grad_value_({p}, most);
    EXPECT_TRUE(at::equal(p.grad(), OracleClamped(before, most)));
  }
  EXPECT_EQ(OracleClipping(7, 0), 1);
  const at::Tensor odd = torch::tensor({kInf, -kInf, kNan});
  const at::Tensor clamped = OracleClamped(odd, 2);
  EXPECT_EQ(clamped[0].item<double>(), 2);
  EXPECT_EQ(clamped[1].item<double>(), -2);
  EXPECT_TRUE(std::isnan(clamped[2].item<double>()));
}

// With p = 1 and 2^53, whose neighbour is 2 away, the order shows.
const double kLarge = std::ldexp(1, 53);

TEST(OracleNorm, LanesAreAddedInPairs) {
  EXPECT_EQ(OracleNorm({Placed({kLarge, 1, 0, 0})}, 1), kLarge);
  EXPECT_EQ(OracleNorm({Placed({kLarge, 1, 1, 0})}, 1), kLarge);
  EXPECT_EQ(OracleNorm({Placed({kLarge, 0, 1, 1})}, 1), kLarge + 2);
  EXPECT_EQ(OracleNorm({Placed({kLarge, 0, 1, 0, 1})}, 1), kLarge);
  EXPECT_EQ(OracleNorm({Placed({kLarge, 0, 0, 0, 1, 0, 1})}, 1), kLarge + 2);
}

TEST(OracleNorm, ALaneHasEveryEighthElementOfABlock) {
  EXPECT_EQ(OracleNorm({Sparse(64, {{0, kLarge}, {8, 1}, {16, 1}})}, 1),
            kLarge);
  EXPECT_EQ(OracleNorm({Sparse(64, {{8, 1}, {16, 1}, {56, kLarge}})}, 1),
            kLarge + 2);
  EXPECT_EQ(OracleNorm({Sparse(80, {{0, kLarge}, {64, 1}, {72, 1}})}, 1),
            kLarge + 2);
}

TEST(OracleNorm, BlocksBeginWithTheStorage) {
  // The values lie at 60, 68 and 76: the first one is in another block.
  std::vector<double> values(17);
  values[0] = kLarge;
  values[8] = values[16] = 1;
  EXPECT_EQ(OracleNorm({Placed(values)}, 1), kLarge);
  EXPECT_EQ(OracleNorm({Placed(values, 60)}, 1), kLarge + 2);
}

TEST(OracleNorm, ElementsAreInTheOrderOfTheirStorage) {
  // Rows of two, side by side or, as a block for each, column by column.
  at::Tensor gradient = torch::zeros({64, 2}, torch::kDouble);
  gradient[0][1] = kLarge;
  gradient[32][1] = gradient[40][1] = 1;
  EXPECT_EQ(OracleNorm({{gradient, {2, 1}, 0}}, 1), kLarge + 2);
  EXPECT_EQ(OracleNorm({{gradient, {1, 64}, 0}}, 1), kLarge);
}

// ---- OracleScale

// Returns the scale after each step; 'x' is a step with an overflow.
std::vector<double> ScalesAfter(OracleScale scale, const std::string& steps) {
  std::vector<double> scales;
  for (char step : steps) {
    scale.Update(step == 'x');
    scales.push_back(scale.scale());
  }
  return scales;
}

LossScaling Scaling(double scale, int64_t window, int64_t hysteresis) {
  LossScaling scaling;
  scaling.scale = scale;
  scaling.window = window;
  scaling.hysteresis = hysteresis;
  return scaling;
}

TEST(OracleScale, DoublesAfterWindowsWithoutOverflow) {
  EXPECT_THAT(ScalesAfter(OracleScale(Scaling(16, 2, 1)), "......"),
              ElementsAre(16, 32, 32, 64, 64, 128));
  EXPECT_THAT(ScalesAfter(OracleScale(Scaling(16, 2, 1)), "..x...."),
              ElementsAre(16, 32, 16, 16, 32, 32, 64));
}

TEST(OracleScale, HalvesAfterAsManyOverflowsAsHysteresisSays) {
  EXPECT_THAT(ScalesAfter(OracleScale(Scaling(16, 2, 2)), "x.xx...xx"),
              ElementsAre(16, 16, 8, 4, 4, 8, 8, 8, 4));
  EXPECT_THAT(ScalesAfter(OracleScale(Scaling(16, 2, 0)), "xxxx"),
              ElementsAre(16, 16, 16, 16));
  LossScaling consecutive = Scaling(16, 9, 2);
  consecutive.consecutive_hysteresis = true;
  EXPECT_THAT(ScalesAfter(OracleScale(consecutive), "x.x.xx"),
              ElementsAre(16, 16, 16, 16, 16, 8));
}

TEST(OracleScale, DoesNotHalveItsMinimum) {
  LossScaling scaling = Scaling(16, 2, 1);
  scaling.min_scale = 5;
  OracleScale scale(scaling);
  scale.Update(true);
  EXPECT_EQ(scale.scale(), 8);
  scale.Update(true);
  EXPECT_EQ(scale.scale(), 5);
  EXPECT_THROW(scale.Update(true), c10::Error);
}

TEST(OracleScale, StaysIfStatic) {
  LossScaling scaling = Scaling(24, 1, 1);
  scaling.dynamic = false;
  EXPECT_THAT(ScalesAfter(OracleScale(scaling), "..x.."),
              ElementsAre(24, 24, 24, 24, 24));
}

}  // namespace
}  // namespace tessera
