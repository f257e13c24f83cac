// The oracle's optimizers against torch::optim's classes and, where libtorch
// has none (Lion) or lacks an option, the formula as its paper has it, of
// float64 tensors; and how it rounds states of bfloat16.
#include "verify/oracle_step.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace tessera {
namespace {

using at::Tensor;

constexpr int64_t kNumel = 257;
constexpr int kSteps = 50;
// Rounding errors of float64, each 2^-53 of what is about 1 here, add up over
// some twenty operations a step and are not amplified by more than the steps.
constexpr double kBound = 0x1p-53 * 20 * kSteps * kSteps;

OracleStepOptions Of(const char* algorithm) {
  OracleStepOptions o;
  o.algorithm = algorithm;
  o.lr = 1e-2;
  o.weight_decay = 0.1;
  return o;
}

Tensor GradientOf(int step) {
  torch::manual_seed(static_cast<uint64_t>(step));
  return torch::randn({kNumel}, at::kDouble);
}

// Trains with `options` on the gradients, in float64.
Tensor Train(const OracleStepOptions& options, const Tensor& start,
             int steps = kSteps) {
  const Tensor master = start.clone();
  const std::vector<Tensor> states = OracleStates(master, options);
  for (int step = 1; step <= steps; ++step) {
    OracleStep(master, states, GradientOf(step), step, options, {},
               /*elementwise=*/true);
  }
  return master;
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<Tensor>)>;

template <typename Optimizer, typename Options>
MakeOptimizer Make(const Options& options) {
  return [options](std::vector<Tensor> parameters) {
    return std::make_unique<Optimizer>(std::move(parameters), options);
  };
}

void ExpectTorchs(const char* name, const OracleStepOptions& options,
                  const MakeOptimizer& make) {
  const Tensor start = GradientOf(-1);
  for (const bool maximize : {false, true}) {
    OracleStepOptions o = options;
    o.maximize = maximize;
    Tensor parameter = start.clone();
    const auto optimizer = make({parameter});
    for (int step = 1; step <= kSteps; ++step) {
      parameter.mutable_grad() = GradientOf(step) * (maximize ? -1 : 1);
      optimizer->step();
    }
    const Tensor apart = (Train(o, start) - parameter).abs();
    EXPECT_LT(apart.max().item<double>(), kBound) << name;
    EXPECT_GT((start - parameter).abs().min().item<double>(), 1e-6) << name;
  }
}

TEST(OracleStepTest, AdamsAreTorchOptims) {
  namespace optim = torch::optim;
  for (const bool amsgrad : {false, true}) {
    OracleStepOptions o = Of("AdamW");
    o.amsgrad = amsgrad;
    ExpectTorchs("AdamW", o,
                 Make<optim::AdamW>(optim::AdamWOptions(o.lr)
                                        .weight_decay(o.weight_decay)
                                        .amsgrad(amsgrad)));
    o.algorithm = "Adam";
    ExpectTorchs("Adam", o,
                 Make<optim::Adam>(optim::AdamOptions(o.lr)
                                       .weight_decay(o.weight_decay)
                                       .amsgrad(amsgrad)));
  }
}

TEST(OracleStepTest, SgdIsTorchOptims) {
  namespace optim = torch::optim;
  OracleStepOptions o = Of("SGD");
  const auto options = optim::SGDOptions(o.lr).weight_decay(o.weight_decay);
  ExpectTorchs("SGD", o, Make<optim::SGD>(options));
  o.momentum = 0.9;
  o.dampening = 0.3;
  ExpectTorchs("momentum", o,
               Make<optim::SGD>(
                   optim::SGDOptions(options).momentum(0.9).dampening(0.3)));
  o.dampening = 0;
  o.nesterov = true;
  ExpectTorchs("nesterov", o,
               Make<optim::SGD>(
                   optim::SGDOptions(options).momentum(0.9).nesterov(true)));
}

TEST(OracleStepTest, AdagradIsTorchOptims) {
  namespace optim = torch::optim;
  OracleStepOptions o = Of("Adagrad");
  o.lr_decay = 0.01;
  o.initial_accumulator_value = 0.1;
  o.eps = 1e-10;
  ExpectTorchs("Adagrad", o,
               Make<optim::Adagrad>(optim::AdagradOptions(o.lr)
                                        .weight_decay(o.weight_decay)
                                        .lr_decay(o.lr_decay)
                                        .initial_accumulator_value(0.1)
                                        .eps(o.eps)));
}

TEST(OracleStepTest, RmsPropIsTorchOptims) {
  namespace optim = torch::optim;
  for (const bool centered : {false, true}) {
    for (const double momentum : {0.0, 0.5}) {
      OracleStepOptions o = Of("RMSprop");
      o.alpha = 0.9;
      o.centered = centered;
      o.momentum = momentum;
      ExpectTorchs("RMSprop", o,
                   Make<optim::RMSprop>(optim::RMSpropOptions(o.lr)
                                            .weight_decay(o.weight_decay)
                                            .alpha(o.alpha)
                                            .centered(centered)
                                            .momentum(momentum)));
    }
  }
}

TEST(OracleStepTest, LionIsThePapers) {
  OracleStepOptions o = Of("Lion");
  o.beta2 = 0.99;
  const Tensor start = GradientOf(-1);
  Tensor master = start.clone(), exp_avg = torch::zeros_like(start);
  for (int step = 1; step <= kSteps; ++step) {
    const Tensor g = GradientOf(step);
    const Tensor direction = (0.9 * exp_avg + 0.1 * g).sign();
    master = master - o.lr * (direction + o.weight_decay * master);
    exp_avg = 0.99 * exp_avg + 0.01 * g;
  }
  EXPECT_LT((Train(o, start) - master).abs().max().item<double>(), kBound);
}

// The whole parameter's norms; the ratio within its limits, and 1 of zeros.
TEST(OracleStepTest, LambIsThePapers) {
  for (const double most : {10.0, 0.3}) {
    for (const double size : {1.0, 0.0}) {
      OracleStepOptions o = Of("Lamb");
      o.max_coeff = most;
      const Tensor start = GradientOf(-1) * size;
      Tensor master = start.clone(), m = torch::zeros_like(start),
             v = torch::zeros_like(start);
      for (int step = 1; step <= kSteps; ++step) {
        const Tensor g = GradientOf(step);
        m = o.beta1 * m + (1 - o.beta1) * g;
        v = o.beta2 * v + (1 - o.beta2) * g * g;
        const Tensor u =
            m / (1 - std::pow(o.beta1, step)) /
                ((v / (1 - std::pow(o.beta2, step))).sqrt() + o.eps) +
            o.weight_decay * master;
        const double norm = master.norm().item<double>();
        const double ratio =
            norm == 0 ? 1
                      : std::clamp(norm / u.norm().item<double>(), 0.01, most);
        master = master - o.lr * ratio * u;
      }
      EXPECT_LT((Train(o, start) - master).abs().max().item<double>(), kBound);
    }
  }
}

// Tests one iteration, of a tall matrix and of a wide one, in float64. In
// bfloat16 the relative rounding error is 2^-9. There are three roundings
// before X of norm 1, so in Frobenius' norm X is off by 3 of these, X X^T by 7,
// its square by 14, and a X + (b X X^T + c (X X^T)^2) X by 4 a + 12 |b| + 19
// |c|.
TEST(OracleStepTest, MuonIsThePapers) {
  constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
  constexpr double kOff = 0x1p-9 * (4 * kA - 12 * kB + 19 * kC);
  for (const int64_t rows : {16, 4}) {
    OracleStepOptions o = Of("Muon");
    o.momentum = 0.95;
    o.nesterov = true;
    o.ns_steps = 1;
    const auto matrix = [&](int step) {
      return GradientOf(step).narrow(0, 0, 64).view({rows, -1});
    };
    const Tensor start = matrix(-1), mine = start.clone();
    const std::vector<Tensor> states = OracleStates(mine, o);
    Tensor master = start.clone(), buffer = torch::zeros_like(start);
    for (int step = 1; step <= kSteps; ++step) {
      const Tensor g = matrix(step);
      OracleStep(mine, states, g, step, o);
      buffer = 0.95 * buffer + 0.05 * g;
      Tensor x = 0.05 * g + 0.95 * buffer;
      x = x / x.norm();
      const Tensor square = x.mm(x.t());
      x = kA * x + (kB * square + kC * square.mm(square)).mm(x);
      const double scale = rows == 16 ? 2 : 1;  // of 16 x 4: sqrt(4)
      master = master * (1 - o.lr * o.weight_decay) - o.lr * scale * x;
      EXPECT_LT((mine - master).norm().item<double>(),
                step * o.lr * scale * kOff);
    }
    EXPECT_GT((master - start).norm().item<double>(), kSteps * o.lr * kOff);
  }
}

// This computes its three sequences; the oracle keeps two of them.
TEST(OracleStepTest, ScheduleFreeIsThePapers) {
  OracleStepOptions o = Of("AdamWScheduleFree");
  o.r = 0.5;
  const Tensor start = GradientOf(-1);
  const Tensor master = start.clone();
  const std::vector<Tensor> states = OracleStates(master, o);
  OracleAverages averages;
  Tensor x = start, z = start, v = torch::zeros_like(start);
  double sum = 0;
  for (int step = 1; step <= kSteps; ++step) {
    o.lr = 1e-2 / (1 + std::abs(step - 9));  // up and down
    o.average_share = averages.Share(std::nullopt, o);
    averages.EndStep();
    const Tensor g = GradientOf(step), y = 0.1 * z + 0.9 * x;
    OracleStep(master, states, g, step, o);
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const Tensor root = (v / (1 - std::pow(o.beta2, step))).sqrt();
    z = z - o.lr * (g / (root + o.eps) + o.weight_decay * y);
    const double largest = step < 9 ? o.lr : 1e-2;
    const double weight = std::sqrt(step) * largest * largest;
    sum += weight;
    x = x + weight / sum * (z - x);
  }
  EXPECT_LT((master - 0.1 * z - 0.9 * x).abs().max().item<double>(), kBound);
  EXPECT_LT((states[0] - z).abs().max().item<double>(), kBound);
  EXPECT_GT((x - z).abs().min().item<double>(), 1e-6);
}

TEST(OracleStepTest, WithoutBiasCorrectionMomentsAreTakenAsTheyAre) {
  OracleStepOptions o = Of("AdamW");
  o.bias_correction = false;
  const Tensor start = GradientOf(-1);
  Tensor master = start.clone(), m = torch::zeros_like(start),
         v = torch::zeros_like(start);
  for (int step = 1; step <= kSteps; ++step) {
    const Tensor g = GradientOf(step);
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    master = master - o.lr * (m / (v.sqrt() + o.eps) + o.weight_decay * master);
  }
  EXPECT_LT((Train(o, start) - master).abs().max().item<double>(), kBound);
}

// One step in float32 is that in float64 except for some roundings, each half a
// unit of what is about 1.
TEST(OracleStepTest, Float32IsNear) {
  for (const char* algorithm : {"AdamW", "Adam", "SGD", "Adagrad", "RMSprop"}) {
    const OracleStepOptions o = Of(algorithm);
    const Tensor start = GradientOf(-1).to(at::kFloat);
    const Tensor master = start.clone();
    OracleStep(master, OracleStates(master, o), GradientOf(1).to(at::kFloat), 1,
               o);
    const Tensor wide = Train(o, start.to(at::kDouble), 1);
    EXPECT_LT((master - wide).abs().max().item<double>(), 0x1p-20);
  }
}

// ---- states of bfloat16

// With beta1 of 0 exp_avg is the gradient.
Tensor Rounded(const Tensor& gradient, int64_t parameter, int64_t step) {
  OracleStepOptions o;
  o.beta1 = 0;
  o.bf16_states = true;
  const Tensor master = torch::zeros_like(gradient);
  const std::vector<Tensor> states = OracleStates(master, o);
  EXPECT_EQ(states[0].scalar_type(), at::kBFloat16);
  OracleRandom random;
  random.parameter = parameter;
  OracleStep(master, states, gradient, step, o, random);
  return states[0].to(at::kFloat);
}

// The mean of many elements with one value equals the value: it is off by less
// than six of its standard deviations, which are at most half a unit over the
// root of their number.
TEST(OracleStepTest, RoundsToEitherNeighbourWithoutBias) {
  constexpr int64_t kMany = 1 << 14;
  for (const double value : {1.003, -0.7001, 3.1e-5}) {
    const Tensor gradient = torch::full({kMany}, value, at::kFloat);
    const Tensor held = Rounded(gradient, 1, 1).to(at::kDouble);
    const double unit = std::abs(value) * 0x1p-7;
    EXPECT_LT(std::abs(held.mean().item<double>() - value), 6 * unit / 2 / 128);
    EXPECT_LE((held - value).abs().max().item<double>(), unit);
    EXPECT_GT((held - value).abs().min().item<double>(), 0);
  }
}

TEST(OracleStepTest, RandomBitsAreOfParameterStepAndElement) {
  const Tensor gradient = torch::full({1000}, 1.003);
  const Tensor one = Rounded(gradient, 1, 1);
  EXPECT_TRUE(one.equal(Rounded(gradient, 1, 1)));
  EXPECT_FALSE(one.equal(Rounded(gradient, 2, 1)));
  EXPECT_FALSE(one.equal(Rounded(gradient, 1, 2)));
  EXPECT_FALSE(one.equal(one.flip(0)));
  EXPECT_TRUE(Rounded(torch::full({9}, 1.0), 1, 1).eq(1).all().item<bool>());
}

}  // namespace
}  // namespace tessera
