// The oracle against cases of one parameter, worked out by hand.
#include "verify/oracle.h"

#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using at::Tensor;
using ::testing::ElementsAre;

// The module has one parameter w, and its gradient is what the test says.
struct LineImpl : torch::nn::Module {
  explicit LineImpl(const Tensor& value) : w(register_parameter("w", value)) {}
  Tensor w;
};

using Gradient = std::function<Tensor(int rank, int64_t micro_batch)>;

// Its loss's gradient, arriving in the parameter's dtype.
Oracle::Loss LossOf(const Gradient& gradient) {
  return [gradient](torch::nn::Module& module, int rank, int64_t micro_batch) {
    const Tensor g = gradient(rank, micro_batch);
    return (dynamic_cast<LineImpl&>(module).w.to(g.dtype()) * g).sum();
  };
}

Oracle Line(const Tensor& value, const OracleOptions& options) {
  return Oracle([value] { return std::make_shared<LineImpl>(value.clone()); },
                options);
}

// w -= lr * g / (|g| + eps)
OracleOptions ByHand(double lr, double eps) {
  OracleOptions options;
  options.optimizer.lr = lr;
  options.optimizer.beta1 = options.optimizer.beta2 = 0;
  options.optimizer.eps = eps;
  return options;
}

std::vector<double> Values(const Tensor& t) {
  const Tensor values = t.to(torch::kDouble).contiguous();
  const auto* data = values.const_data_ptr<double>();
  return std::vector<double>(data, data + values.numel());
}

// The step gradient of gradients [rank][micro-batch].
double GradientOf(OracleOptions options,
                  const std::vector<std::vector<double>>& gradients) {
  options.world_size = static_cast<int>(gradients.size());
  options.accumulation = static_cast<int>(gradients[0].size());
  Oracle oracle = Line(torch::zeros({1}), options);
  oracle.TrainStep(LossOf([&](int rank, int64_t micro_batch) {
    return torch::full({1}, gradients[rank][micro_batch]);
  }));
  return oracle.gradient("w").item<double>();
}

double Pow2(int exponent) { return std::ldexp(1, exponent); }

TEST(Reduction, IsTheMeanOfRanksAndMicroBatches) {
  EXPECT_EQ(GradientOf({}, {{1, 3}, {5, 7}, {9, 17}}), 7);
  // The sum is in rank order, where that shows.
  EXPECT_EQ(GradientOf({}, {{Pow2(24)}, {1}, {1}, {0}}), Pow2(22));
  EXPECT_EQ(GradientOf({}, {{1}, {1}, {Pow2(24)}, {0}}), Pow2(22) + 0.5);
}

TEST(Reduction, OfSumsAddsUp) {
  OracleOptions options;
  options.sum = true;
  EXPECT_EQ(GradientOf(options, {{2, 6}, {10, 14}}), 16);
}

TEST(Reduction, In16BitsRoundsOnce) {
  OracleOptions options;
  const double small = Pow2(-9);  // a quarter of the distance to 1's neighbour
  const std::vector<std::vector<double>> gradients = {
      {1}, {small}, {small}, {small}};
  EXPECT_EQ(GradientOf(options, gradients), (1 + 3 * small) / 4);
  options.reduce_dtype = torch::kBFloat16;
  EXPECT_EQ(GradientOf(options, gradients), (1 + 4 * small) / 4);
  options.dtype = torch::kBFloat16;
  EXPECT_EQ(GradientOf(options, gradients), (1 + 4 * small) / 4);
  options.reduce_dtype = torch::kFloat;
  EXPECT_EQ(GradientOf(options, gradients), (1 + 3 * small) / 4);
}

TEST(Reduction, OfShardGroupsAddsTheirSums) {
  OracleOptions options;
  const std::vector<std::vector<double>> odd = {{1}, {Pow2(24)}, {1}, {1}};
  EXPECT_EQ(GradientOf(options, odd), Pow2(22));
  options.shard_group_size = 2;
  EXPECT_EQ(GradientOf(options, odd), Pow2(22) + 0.5);
  options.shard_group_size = 1;
  EXPECT_EQ(GradientOf(options, odd), Pow2(22));
  // Each group's sum is rounded.
  const double small = Pow2(-9);
  options.shard_group_size = 2;
  options.reduce_dtype = torch::kBFloat16;
  EXPECT_EQ(GradientOf(options, {{1}, {small}, {small}, {small}}), 0.25);
}

TEST(Reduction, PredivideKeepsSumsInRange) {
  OracleOptions options;
  options.dtype = torch::kHalf;
  EXPECT_EQ(GradientOf(options, {{40000}, {40000}}),
            std::numeric_limits<double>::infinity());
  options.predivide = 2;
  EXPECT_EQ(GradientOf(options, {{40000}, {40000}}), 40000);
  options.predivide = 4;
  EXPECT_EQ(GradientOf(options, {{40000}, {8000}}), 24000);
}

TEST(Reduction, LocallyAccumulatedRoundsOnceAStep) {
  OracleOptions options;
  options.dtype = torch::kBFloat16;
  const double small = Pow2(-9);
  const std::vector<std::vector<double>> gradients = {
      {4, 4 * small, 4 * small, 4 * small}};
  EXPECT_EQ(GradientOf(options, gradients), 1 + 3 * small);
  options.accumulate_locally = true;
  EXPECT_EQ(GradientOf(options, gradients), 1 + 4 * small);
}

TEST(Clipping, OfTwiceTheNorm) {
  OracleOptions options = ByHand(1, 1);
  options.max_norm = 2.5;
  Oracle oracle = Line(torch::zeros({2}), options);
  oracle.TrainStep(LossOf([](int, int64_t) {
    return torch::tensor({3., 4.});
  }));
  EXPECT_EQ(oracle.outcome().norm, 5);
  const auto factor = static_cast<float>(2.5 / (5 + 1e-6));
  const float a = 3 * factor, b = 4 * factor;
  EXPECT_THAT(
      Values(oracle.parameter("w")),
      ElementsAre(-a / (std::sqrt(a * a) + 1), -b / (std::sqrt(b * b) + 1)));
}

TEST(Clipping, LeavesSmallerNormsAlone) {
  OracleOptions options = ByHand(1, 1);
  options.max_norm = 5 + 2e-6;
  Oracle oracle = Line(torch::zeros({2}), options);
  oracle.TrainStep(LossOf([](int, int64_t) {
    return torch::tensor({3., 4.});
  }));
  EXPECT_THAT(Values(oracle.parameter("w")), ElementsAre(-0.75f, -0.8f));
}

TEST(Clipping, IsOfUnscaledGradientsAndOfAnyNorm) {
  OracleOptions options = ByHand(1, 1);
  options.loss_scaling.emplace().scale = 1024;
  options.max_norm = 1;
  options.norm_p = std::numeric_limits<double>::infinity();
  Oracle oracle = Line(torch::zeros({2}), options);
  oracle.TrainStep(LossOf([](int, int64_t) {
    return torch::tensor({-3., 4.});
  }));
  EXPECT_EQ(oracle.outcome().norm, 4);
  EXPECT_THAT(Values(oracle.gradient("w")), ElementsAre(-3072, 4096));
  const auto factor = static_cast<float>(1 / 1024. / (4 + 1e-6));
  const float a = 3072 * factor, b = 4096 * factor;
  EXPECT_THAT(Values(oracle.parameter("w")),
              ElementsAre(a / (a + 1), -b / (b + 1)));
}

// w[i][0] lies at 60 + i of its storage. 2^53 takes in a 1 that is added in its
// lane, but not one of another block.
TEST(Clipping, BlocksOfTheNormAreThoseOfTheStorage) {
  OracleOptions options;
  options.norm_p = 1;
  auto norm = [&](int64_t large, int64_t one, int64_t other_one) {
    Oracle oracle(
        [] {
          return std::make_shared<LineImpl>(
              torch::zeros({2, 128}).t().narrow(0, 60, 50));
        },
        options);
    Tensor gradient = torch::zeros({50, 2});
    gradient[large][0] = Pow2(53);
    gradient[one][0] = gradient[other_one][0] = 1;
    oracle.TrainStep(LossOf([&](int, int64_t) { return gradient; }));
    return oracle.outcome().norm;
  };
  EXPECT_EQ(norm(0, 8, 16), Pow2(53) + 2);
  EXPECT_EQ(norm(8, 40, 48), Pow2(53));
}

// Integers, so that all but the last division is exact: the mean over all
// samples, wherever these were.
TEST(Weights, OfUnevenBatchesMakeTheMeanOfAllSamples) {
  const std::vector<std::vector<int64_t>> samples = {{5, 3}, {1, 7}, {0, 2}};
  OracleOptions options = ByHand(1, 1);
  options.world_size = 3;
  options.accumulation = 2;
  options.weight = [&](int rank, int64_t i) -> double {
    return static_cast<double>(samples[rank][i]);
  };
  for (bool locally : {false, true}) {
    options.accumulate_locally = locally;
    Oracle oracle = Line(torch::zeros({4}), options);
    Tensor all = torch::empty({0, 4});
    oracle.TrainStep([&](torch::nn::Module& module, int rank, int64_t i) {
      if (samples[rank][i] == 0) return Tensor();
      const Tensor x =
          torch::randint(-9, 10, {samples[rank][i], 4}).to(torch::kFloat);
      all = torch::cat({all, x});
      return torch::matmul(x, dynamic_cast<LineImpl&>(module).w).mean();
    });
    EXPECT_EQ(all.size(0), 18);
    EXPECT_TRUE(oracle.gradient("w").equal(all.sum(0)));
    const Tensor mean = all.to(torch::kDouble).mean(0);
    EXPECT_NEAR(oracle.outcome().norm, mean.norm().item<double>(), Pow2(-50));
    // Rounding errors of numbers below 10: 1/T, the product, the sum, the
    // quotient.
    const Tensor off = (oracle.parameter("w") + mean / (mean.abs() + 1)).abs();
    EXPECT_LE(off.max().item<double>(), 4 * Pow2(-24));
  }
}

TEST(Weights, OfZeroMakeZeros) {
  OracleOptions options = ByHand(1, 1);
  options.world_size = 2;
  options.weight = [](int rank, int64_t) { return rank == 0 ? 0 : 2; };
  Oracle oracle = Line(torch::zeros({1}), options);
  oracle.TrainStep(LossOf([](int rank, int64_t) {
    return torch::full({1}, rank == 0 ? std::nan("") : 3.0);
  }));
  EXPECT_THAT(Values(oracle.gradient("w")), ElementsAre(6));
  EXPECT_THAT(Values(oracle.parameter("w")), ElementsAre(-0.75f));
}

// ---- 16-bit parameters

void ExpectMastersToKeepSmallSteps(Oracle oracle) {
  auto loss = LossOf([](int, int64_t) { return torch::ones({1}); });
  for (int step = 0; step < 7; ++step) oracle.TrainStep(loss);
  // 2^-12 is a sixteenth of the distance to 1's neighbour below.
  EXPECT_EQ(oracle.parameter("w").scalar_type(), torch::kBFloat16);
  EXPECT_THAT(Values(oracle.parameter("w")), ElementsAre(1));
  EXPECT_THAT(Values(oracle.master("w")), ElementsAre(1 - 7 * Pow2(-12)));
  for (int step = 7; step < 16; ++step) oracle.TrainStep(loss);
  EXPECT_THAT(Values(oracle.parameter("w")), ElementsAre(1 - Pow2(-8)));
  EXPECT_THAT(Values(oracle.master("w")), ElementsAre(1 - Pow2(-8)));
}

TEST(Bfloat16, MastersKeepWhatItWouldLose) {
  OracleOptions options = ByHand(Pow2(-12), 0);
  ExpectMastersToKeepSmallSteps(
      Line(torch::ones({1}, torch::kBFloat16), options));
  options.dtype = torch::kBFloat16;
  ExpectMastersToKeepSmallSteps(Line(torch::ones({1}), options));
}

TEST(Bfloat16, SkipsWhatIsNotFiniteIfAsked) {
  for (bool skip : {false, true}) {
    OracleOptions options = ByHand(1, 1);
    options.dtype = torch::kBFloat16;
    options.skip_overflows = skip;
    Oracle oracle = Line(torch::ones({1}), options);
    oracle.TrainStep(
        LossOf([](int, int64_t) { return torch::full({1}, INFINITY); }));
    EXPECT_EQ(oracle.outcome().skipped, skip);
    EXPECT_EQ(oracle.outcome().scale, 1);
    EXPECT_EQ(std::isfinite(Values(oracle.parameter("w"))[0]), skip);
  }
}

// The step count that AdamW corrects its averages with is that of steps taken.
TEST(Float16, ASkippedStepLeavesNoTrace) {
  OracleOptions options;
  options.dtype = torch::kHalf;
  options.loss_scaling.emplace().dynamic = false;
  options.loss_scaling->scale = 8;
  auto train = [&](const std::string& steps) {
    Oracle oracle = Line(torch::ones({3}), options);
    for (char step : steps) {
      oracle.TrainStep(LossOf([step](int, int64_t) {
        return torch::full({3}, step == 'x' ? 1e30 : 0.3);
      }));
    }
    return Values(oracle.master("w"));
  };
  EXPECT_EQ(train("x.x..xx."), train("...."));
  EXPECT_NE(train("..."), train("...."));
}

TEST(Dtypes, ComplexIsPairsOfReals) {
  OracleOptions options = ByHand(1, 1);
  options.max_norm = 2.5;
  options.dtype = torch::kBFloat16;
  const Tensor zero = torch::zeros({1}, torch::kComplexFloat);
  Oracle oracle = Line(zero, options);
  oracle.TrainStep([](torch::nn::Module& module, int, int64_t) {
    const Tensor w = torch::view_as_real(dynamic_cast<LineImpl&>(module).w);
    return (w * torch::tensor({{3., 4.}})).sum();
  });
  EXPECT_EQ(oracle.outcome().norm, 5);
  const auto factor = static_cast<float>(2.5 / (5 + 1e-6));
  const float a = 3 * factor, b = 4 * factor;
  EXPECT_EQ(oracle.parameter("w").scalar_type(), torch::kComplexFloat);
  EXPECT_THAT(Values(torch::view_as_real(oracle.parameter("w"))),
              ElementsAre(-a / (a + 1), -b / (b + 1)));
}

}  // namespace
}  // namespace tessera
