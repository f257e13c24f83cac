// States of 8 bits: what block8.h says of them.
#include "optim/kernels/block8.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "optim/algorithms/coefficients.h"
#include "optim/kernels/element_step.h"
#include "optim/kernels/state_types_test_util.h"

namespace tessera {
namespace {

float ScaleOf(const at::Tensor& state, int64_t block) {
  float scale;
  std::memcpy(&scale,
              static_cast<const char*>(state.const_data_ptr()) +
                  block * kBlock8Bytes + kBlock8Elements,
              sizeof(scale));
  return scale;
}

// block8.h, of one code.
double ValueOf(uint8_t code, bool non_negative, double scale) {
  const int rest = non_negative ? code : code & 0x7f;
  const int one = non_negative ? 31 : 15;
  if (rest == 0) return 0;
  const double magnitude =
      std::ldexp(1 + (rest & 7) / 8.0, (rest >> 3) - one) * scale;
  return !non_negative && (code & 0x80) != 0 ? -magnitude : magnitude;
}

std::vector<double> Values(const at::Tensor& state, int64_t numel,
                           bool non_negative) {
  const auto* const bytes = state.const_data_ptr<uint8_t>();
  std::vector<double> values;
  for (int64_t i = 0; i < numel; ++i) {
    const int64_t block = i / kBlock8Elements;
    values.push_back(ValueOf(bytes[block * kBlock8Bytes + i % kBlock8Elements],
                             non_negative, ScaleOf(state, block)));
  }
  return values;
}

// beta1 0 and beta2 0: exp_avg is the gradient, exp_avg_sq its square.
TEST(StateTypesTest, Block8HoldsWhatItsHeaderSays) {
  constexpr int64_t kNumel = 64 * 200;
  OptimizerOptions take;
  take.beta1 = take.beta2 = 0;
  torch::manual_seed(4);
  at::Tensor gradient = torch::randn({kNumel}) *
                        torch::exp2(torch::empty({kNumel}).uniform_(-20, 0));
  gradient.slice(0, 0, 64).zero_();
  gradient.slice(0, 64, 128).fill_(3);
  for (const Isa isa : Isas()) {
    SteppedStates m(kNumel, NumberType::kBlock8);
    StepElements(kFormula, m.Range(gradient), CoefficientsOf(take, 1), isa);
    const auto moments = Values(m.states[0], kNumel, false);
    const auto squares = Values(m.states[1], kNumel, true);
    for (int64_t i = 0; i < kNumel; ++i) {
      const auto at = static_cast<size_t>(i);
      const double g = gradient[i].item<float>(), square = g * g;
      const double scale = ScaleOf(m.states[0], i / 64);
      ASSERT_EQ(scale, std::exp2(std::ilogb(scale)));
      ASSERT_LE(std::abs(moments[at] - g),
                std::max(std::abs(g) * 0x1p-3, scale * 9 * 0x1p-18));
      ASSERT_LE(std::abs(squares[at] - square),
                std::max(square * (0x1p-3 + 0x1p-22),
                         ScaleOf(m.states[1], i / 64) * 0x1p-30));
      ASSERT_EQ(squares[at] == 0, square == 0) << i;
    }
  }
}

// As bfloat16 is, above; with a seed, of all states.
TEST(StateTypesTest, Block8IsRoundedWithoutBias) {
  constexpr int64_t kNumel = 1 << 16;
  OptimizerOptions take;
  take.beta1 = take.beta2 = 0;
  for (const float value : {1.003f, -0.7001f, 1.93f}) {
    const at::Tensor gradient = torch::full({kNumel}, value);
    for (const Isa isa : Isas()) {
      SteppedStates m(kNumel, NumberType::kBlock8);
      StepElements(kFormula, m.Range(gradient),
                   CoefficientsOf(take, 1, 1, SeedOf(1, 1)), isa);
      for (int s = 0; s < 2; ++s) {
        const double expected = s == 0 ? value : double{value} * value;
        double sum = 0;
        for (const double x : Values(m.states[s], kNumel, s == 1)) sum += x;
        const double unit = std::abs(expected) * 0x1p-3;
        EXPECT_LT(std::abs(sum / kNumel - expected),
                  6 * unit / 2 / std::sqrt(static_cast<double>(kNumel)))
            << value << " " << s;
      }
    }
  }
}

// Without gradients moments decay by their betas, all of them: to the nearest
// they would stand still where a step is less than half a unit.
TEST(StateTypesTest, MomentsOfFewBitsDecay) {
  constexpr int64_t kNumel = 1 << 14;
  constexpr int kSteps = 700;
  OptimizerOptions take, decay;
  take.beta1 = take.beta2 = 0;
  decay.beta1 = 0.99;
  decay.beta2 = 0.999;
  for (const NumberType type : {NumberType::kBFloat16, NumberType::kBlock8}) {
    SteppedStates m(kNumel, type);
    const at::Tensor ones = torch::ones({kNumel}),
                     none = torch::zeros({kNumel});
    StepElements(kFormula, m.Range(ones), CoefficientsOf(take, 1));
    for (int step = 2; step < 2 + kSteps; ++step) {
      StepElements(kFormula, m.Range(none),
                   CoefficientsOf(decay, step, 1, SeedOf(1, step)));
    }
    for (int s = 0; s < 2; ++s) {
      double sum = 0;
      if (type == NumberType::kBlock8) {
        for (const double x : Values(m.states[s], kNumel, s == 1)) sum += x;
      } else {
        sum = m.states[s]
                  .view(at::kBFloat16)
                  .to(at::kDouble)
                  .sum()
                  .item<double>();
      }
      // Each step adds a variance of at most a quarter of a unit squared.
      const double expected = std::pow(s == 0 ? 0.99 : 0.999, kSteps);
      const double deviation = 0x1p-4 * std::sqrt(kSteps / double{kNumel});
      EXPECT_LT(std::abs(sum / kNumel - expected), 6 * deviation)
          << static_cast<int>(type) << " " << s;
    }
  }
}

// What is held is what it would be made of again: nothing creeps.
TEST(StateTypesTest, Block8KeepsWhatItHolds) {
  constexpr int64_t kNumel = 64 * 50;
  SteppedStates m(kNumel, NumberType::kBlock8);
  for (int step = 1; step <= 3; ++step) Step(m, step, BestIsa());
  const std::string before = m.Bits();
  OptimizerOptions keep;  // lerp of weight 0, times 1
  keep.beta1 = keep.beta2 = 1;
  keep.lr = 0;
  keep.bias_correction = false;
  const at::Tensor gradient = torch::randn({kNumel});
  for (const Isa isa : Isas()) {
    StepElements(kFormula, m.Range(gradient), CoefficientsOf(keep, 4), isa);
    EXPECT_TRUE(m.Bits() == before) << IsaName(isa);
  }
}

// block8.h's, of all that a step may leave there: also blocks of next to
// nothing, and NaN. So a state goes through a checkpoint of float32 and back.
TEST(StateTypesTest, Block8IsDecodedAndEncodedToTheSameBytes) {
  OptimizerOptions take;
  take.beta1 = take.beta2 = 0;
  torch::manual_seed(6);
  for (const int64_t numel : {1, 63, 64, 65, 64 * 300}) {
    for (const double size : {1e18, 1., 1e-18, 1e-19, 1e-20, 3e-22}) {
      SteppedStates m(numel, NumberType::kBlock8);
      at::Tensor gradient =
          torch::randn({numel}) *
          torch::exp2(torch::empty({numel}).uniform_(-40, 0)) * size;
      if (numel > 64) gradient[64] = NAN;
      StepElements(kFormula, m.Range(gradient), CoefficientsOf(take, 1));
      for (int s = 0; s < 2; ++s) {
        const at::Tensor& state = m.states[s];
        std::vector<float> numbers(static_cast<size_t>(numel));
        DecodeBlock8(state.const_data_ptr(), numel, s == 1, numbers.data());
        const std::vector<double> expected = Values(state, numel, s == 1);
        for (size_t i = 0; i < numbers.size(); ++i) {
          if (numel > 64 && i / 64 == 1) {
            ASSERT_TRUE(std::isnan(numbers[i]));
          } else {
            ASSERT_EQ(numbers[i], static_cast<float>(expected[i])) << i;
          }
        }
        const at::Tensor again = torch::full({state.numel()}, 255, at::kByte);
        EncodeBlock8(numbers.data(), numel, s == 1, again.mutable_data_ptr());
        ASSERT_TRUE(again.equal(state)) << numel << " " << size << " " << s;
      }
    }
  }
}

TEST(StateTypesTest, Block8OfWhatIsNeverNegativeLeavesTheSignOut) {
  float numbers[64], again[64];
  for (float& x : numbers) x = 1;
  numbers[3] = -0.f;
  numbers[4] = -0.5f;
  char block[kBlock8Bytes];
  EncodeBlock8(numbers, 64, /*non_negative=*/true, block);
  DecodeBlock8(block, 64, /*non_negative=*/true, again);
  EXPECT_EQ(again[3], 0);
  EXPECT_EQ(again[4], 0.5f);
  EXPECT_EQ(again[5], 1);
}

// Ranges may begin within a block; an empty one does nothing.
TEST(StateTypesTest, Block8HasTheSameBitsWherePartsOfABlockAreStepped) {
  const at::Tensor gradient = GradientOf(200, 1);
  const auto stepped = [&](Isa isa) {
    const SteppedStates m(200, NumberType::kBlock8);
    for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{
             {190, 190}, {0, 70}, {70, 150}, {150, 200}}) {
      const std::string before = m.Bits();
      StepElements(kFormula, Part(m.Range(gradient), begin, end),
                   CoefficientsOf({.lr = 1e-2}, 1), isa);
      EXPECT_EQ(m.Bits() == before, begin == end);
    }
    return m.Bits();
  };
  const std::string expected = stepped(Isa::kPortable);
  for (const Isa isa : Isas()) {
    EXPECT_TRUE(stepped(isa) == expected) << IsaName(isa);
  }
}

TEST(StateTypesTest, Block8WithAnInfinityIsNan) {
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    for (const Isa isa : Isas()) {
      SteppedStates m(192, NumberType::kBlock8);
      at::Tensor gradient = torch::ones({192});
      gradient[70] = bad;
      StepElements(kFormula, m.Range(gradient), CoefficientsOf({}, 1), isa);
      for (int s = 0; s < 2; ++s) {
        EXPECT_TRUE(std::isfinite(ScaleOf(m.states[s], 0)));
        EXPECT_TRUE(std::isnan(ScaleOf(m.states[s], 1)));
        EXPECT_TRUE(std::isfinite(ScaleOf(m.states[s], 2)));
      }
    }
  }
}

// A parameter that begins and ends within blocks: the others' elements stay,
// within the rounding of their block.
TEST(StateTypesTest, Block8LeavesTheRestOfABlock) {
  const at::Tensor gradient = torch::full({200}, 0.5f);
  for (const Isa isa : Isas()) {
    SteppedStates m(200, NumberType::kBlock8);
    const OptimizerOptions half = {.beta1 = 0.5};
    StepElements(kFormula, m.Range(gradient), CoefficientsOf(half, 1), isa);
    const at::Tensor masters = m.master.clone();
    StepElements(kFormula, Part(m.Range(gradient), 70, 150),
                 CoefficientsOf(half, 2), isa);
    const auto moments = Values(m.states[0], 200, false);
    for (int64_t i = 0; i < 200; ++i) {
      const bool in = i >= 70 && i < 150;
      EXPECT_EQ(masters[i].item<float>() != m.master[i].item<float>(), in);
      // Half of the gradient, and half of the rest; a step with no gradient
      // would leave a quarter of it.
      const double expected = in ? 0.375 : 0.25;
      EXPECT_LE(std::abs(moments[static_cast<size_t>(i)] - expected),
                expected * 0x1p-3)
          << i;
    }
  }
}

}  // namespace
}  // namespace tessera
