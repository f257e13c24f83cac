// Schedule-free AdamW over a hundred steps in float64: against its paper's
// sequences x, y and z, and against numbers of the package schedulefree; and
// the weights of its average.
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "optim/algorithms/average_weights.h"
#include "optim/algorithms/coefficients.h"
#include "optim/kernels/element_step.h"

namespace tessera {
namespace {

constexpr int kSteps = 100;
constexpr int kNumel = 3;
constexpr double kStart[kNumel] = {1, -0.5, 0.25};
// Rounding errors of float64, each 2^-53 of what is about 1 here, add up over
// some thirty operations a step and are not amplified by more than the steps.
constexpr double kBound = 0x1p-53 * 30 * kSteps * kSteps;

struct Case {
  double lr, beta1, beta2, eps, weight_decay, r, weight_lr_power;
  int warmup_steps;
  // The values of schedulefree 1.4.1's AdamWScheduleFree in float64, after the
  // steps.
  double sum, y[kNumel], z[kNumel], x[kNumel];
};
const Case kCases[] = {
    {0.0025,
     0.9,
     0.999,
     1e-8,
     0,
     0,
     2,
     0,
     0x1.47ae147ae1478p-11,
     {0x1.d8c88bc7a75bep-1, -0x1.cf95442b6ccd7p-2, 0x1.d71ea07b2c826p-3},
     {0x1.b751947878f6cp-1, -0x1.b00c62e9e5871p-2, 0x1.b2a7ecd2b240ep-3},
     {0x1.dc806e5eac839p-1, -0x1.d31640c0ed9c6p-2, 0x1.db2bd0e33a17ep-3}},
    {0.02,
     0.8,
     0.99,
     1e-3,
     0.1,
     1,
     2,
     10,
     0x1.014af4f0d844cp+1,
     {0x1.4bd28692a9147p-2, -0x1.427f5ec2bc0aep-3, 0x1.2bba9c61d8ca2p-4},
     {0x1.df7ea55255e58p-4, -0x1.7af94e2770e39p-4, 0x1.07e9c02dfd5b7p-5},
     {0x1.80cf3de22dfb3p-2, -0x1.63c00cae7cf12p-3, 0x1.55ac0b748f514p-4}},
    {0.01,
     0.9,
     0.999,
     1e-8,
     0.01,
     0.3,
     0.5,
     0,
     0x1.ecb1c485c8a1ep+4,
     {0x1.5e6354bf27c67p-1, -0x1.42af44ec11833p-2, 0x1.568b4f3be1688p-3},
     {0x1.f0bef9bb52e01p-2, -0x1.df574f60300e3p-3, 0x1.dcec1ca671a2dp-4},
     {0x1.69b917666eb3ap-1, -0x1.4be88f4810c9ep-2, 0x1.621be4ab1095cp-3}}};

OptimizerOptions OptionsOf(const Case& c) {
  OptimizerOptions o;
  o.algorithm = Algorithm::kScheduleFree;
  o.beta1 = c.beta1;
  o.beta2 = c.beta2;
  o.eps = c.eps;
  o.weight_decay = c.weight_decay;
  o.r = c.r;
  o.weight_lr_power = c.weight_lr_power;
  return o;
}

double RateOf(const Case& c, int step) {
  return step < c.warmup_steps ? c.lr * step / c.warmup_steps : c.lr;
}

double GradientOf(double y, int step, int element) {
  return std::cos(0.7 * step + element) + 0.5 * y;
}

struct Trained {
  double y[kNumel], z[kNumel];
  AverageWeights weights;
};

// States begin as what is certainly not z.
Trained Train(const Case& c) {
  Trained t;
  double squares[kNumel] = {}, gradients[kNumel];
  for (int i = 0; i < kNumel; ++i) {
    t.y[i] = kStart[i];
    t.z[i] = 77;
  }
  StepRange range;
  range.master = t.y;
  range.states[0] = t.z;
  range.states[1] = squares;
  range.gradient = gradients;
  range.numel = kNumel;
  range.master_type = range.state_type = range.gradient_type =
      NumberType::kFloat64;
  OptimizerOptions o = OptionsOf(c);
  for (int step = 1; step <= kSteps; ++step) {
    for (int i = 0; i < kNumel; ++i) gradients[i] = GradientOf(t.y[i], step, i);
    o.lr = RateOf(c, step);
    o.average_share = t.weights.ShareOf(o);
    t.weights = t.weights.After(o);
    StepElements(FormulaOf(o), range, CoefficientsOf(o, step));
  }
  return t;
}

double AverageOf(const Case& c, double y, double z) {
  return y + (1 - 1 / c.beta1) * (z - y);
}

TEST(ScheduleFreeTest, IsTheReferences) {
  for (const Case& c : kCases) {
    const Trained t = Train(c);
    EXPECT_NEAR(t.weights.sum, c.sum, c.sum * 0x1p-53 * 4 * kSteps);
    EXPECT_EQ(t.weights.largest_rate, c.lr);
    for (int i = 0; i < kNumel; ++i) {
      EXPECT_NEAR(t.y[i], c.y[i], kBound);
      EXPECT_NEAR(t.z[i], c.z[i], kBound);
      EXPECT_NEAR(AverageOf(c, t.y[i], t.z[i]), c.x[i], 2 * kBound / c.beta1);
    }
  }
}

// x, of which the kernel knows nothing, is a sequence of its own here, and y
// what is between it and z.
TEST(ScheduleFreeTest, IsThePapers) {
  for (const Case& c : kCases) {
    const Trained t = Train(c);
    for (int i = 0; i < kNumel; ++i) {
      double x = kStart[i], z = kStart[i], square = 0, sum = 0, largest = 0;
      for (int step = 1; step <= kSteps; ++step) {
        const double lr = RateOf(c, step);
        const double y = (1 - c.beta1) * z + c.beta1 * x;
        const double g = GradientOf(y, step, i);
        square = c.beta2 * square + (1 - c.beta2) * g * g;
        const double unbiased = square / (1 - std::pow(c.beta2, step));
        z -= lr * (g / (std::sqrt(unbiased) + c.eps) + c.weight_decay * y);
        largest = std::max(largest, lr);
        const double weight =
            std::pow(step, c.r) * std::pow(largest, c.weight_lr_power);
        sum += weight;
        x += weight / sum * (z - x);
      }
      EXPECT_NEAR(t.z[i], z, kBound);
      EXPECT_NEAR(t.y[i], (1 - c.beta1) * z + c.beta1 * x, kBound);
      EXPECT_NEAR(AverageOf(c, t.y[i], t.z[i]), x, 2 * kBound / c.beta1);
    }
  }
}

TEST(ScheduleFreeTest, RatesOfZeroWeighNothing) {
  OptimizerOptions o;
  o.lr = 0;
  AverageWeights weights;
  EXPECT_EQ(weights.ShareOf(o), 0);
  weights = weights.After(o);
  EXPECT_EQ(weights.steps, 1);
  EXPECT_EQ(weights.sum, 0);
  o.lr = 0.5;
  EXPECT_EQ(weights.ShareOf(o), 1);
  weights = weights.After(o);
  o.lr = 0.25;  // the largest rate counts
  EXPECT_EQ(weights.ShareOf(o), 0.5);
  EXPECT_EQ(weights.After(o), (AverageWeights{3, 0.5, 0.5}));
  o.r = 1;
  EXPECT_EQ(weights.ShareOf(o), 0.75);
}

}  // namespace
}  // namespace tessera
