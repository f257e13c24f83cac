// States of 16 and of 8 bits: what their memory holds, that it is the same
// however a range is cut and by whatever instructions, and how far a training
// with them is from one with float32.
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "optim/kernels/block8.h"
#include "optim/kernels/element_step.h"

namespace tessera {
namespace {

constexpr Formula kFormula = Formula::kAdamW;

std::vector<Isa> Isas() {
  std::vector<Isa> isas = {Isa::kPortable};
  if (BestIsa() >= Isa::kAvx2) isas.push_back(Isa::kAvx2);
  if (BestIsa() >= Isa::kAvx512) isas.push_back(Isa::kAvx512);
  return isas;
}

struct Memory {
  Memory(int64_t numel, NumberType type)
      : type(type),
        master(torch::zeros({numel})),
        states{torch::zeros({BytesOf(type, numel)}, at::kByte),
               torch::zeros({BytesOf(type, numel)}, at::kByte)} {}
  StepRange Range(const at::Tensor& gradient) const {
    StepRange r;
    r.master = master.data_ptr();
    for (int s = 0; s < 2; ++s) r.states[s] = states[s].data_ptr();
    r.gradient = gradient.const_data_ptr();
    r.numel = master.numel();
    r.state_type = type;
    return r;
  }
  std::string Bits() const {
    std::string bits;
    for (const at::Tensor& t : {master, states[0], states[1]}) {
      bits.append(static_cast<const char*>(t.const_data_ptr()), t.nbytes());
    }
    return bits;
  }
  NumberType type;
  at::Tensor master;
  at::Tensor states[2];
};

at::Tensor GradientOf(int64_t numel, int step) {
  torch::manual_seed(static_cast<uint64_t>(step));
  return torch::randn({numel}) * torch::logspace(-6, 2, numel);
}

void Step(const Memory& memory, int step, Isa isa) {
  const at::Tensor gradient = GradientOf(memory.master.numel(), step);
  StepElements(kFormula, memory.Range(gradient),
               CoefficientsOf({.lr = 1e-2}, step, 1, SeedOf(3, step)), isa);
}

constexpr NumberType kTypes[] = {NumberType::kBFloat16, NumberType::kBlock8};

TEST(StateTypesTest, InstructionSetsAndCutsHaveTheSameBits) {
  for (const NumberType type : kTypes) {
    for (const int64_t numel : {1, 15, 17, 63, 64, 65, 1009, 5000}) {
      Memory whole(numel, type);
      for (int step = 1; step <= 4; ++step) Step(whole, step, Isa::kPortable);
      for (const Isa isa : Isas()) {
        // Of blocks at their ends; within one see below.
        const int64_t piece = type == NumberType::kBlock8 ? 128 : 29;
        Memory cut(numel, type);
        for (int step = 1; step <= 4; ++step) {
          const at::Tensor gradient = GradientOf(numel, step);
          const auto k = CoefficientsOf({.lr = 1e-2}, step, 1, SeedOf(3, step));
          for (int64_t begin = 0; begin < numel; begin += piece) {
            StepElements(kFormula,
                         Part(cut.Range(gradient), begin,
                              std::min(begin + piece, numel)),
                         k, isa);
          }
        }
        ASSERT_TRUE(cut.Bits() == whole.Bits())
            << IsaName(isa) << " " << numel << " " << static_cast<int>(type);
      }
    }
  }
}

// ---- bfloat16

// Of many elements with one value the mean is the value, as only stochastic
// rounding has it: off by less than six of its standard deviations, which are
// at most half a unit over the root of their number.
TEST(StateTypesTest, BFloat16IsRoundedWithoutBias) {
  constexpr int64_t kNumel = 1 << 16;
  for (const float value : {1.003f, -0.7001f, 3.1e-5f}) {
    for (const Isa isa : Isas()) {
      Memory m(kNumel, NumberType::kBFloat16);
      const at::Tensor gradient = torch::full({kNumel}, value);
      OptimizerOptions take;  // exp_avg becomes the gradient
      take.beta1 = 0;
      StepElements(kFormula, m.Range(gradient),
                   CoefficientsOf(take, 1, 1, SeedOf(1, 1)), isa);
      const at::Tensor held = m.states[0].view(at::kBFloat16).to(at::kDouble);
      const double unit = std::abs(value) * 0x1p-7;
      EXPECT_LT(std::abs(held.mean().item<double>() - value),
                6 * unit / 2 / std::sqrt(static_cast<double>(kNumel)));
      EXPECT_LE((held - value).abs().max().item<double>(), unit);
      // Neighbours are independent: as often the same as not.
      const at::Tensor up = held > value;
      const double share = up.to(at::kDouble).mean().item<double>();
      const double both = (up.slice(0, 1) & up.slice(0, 0, kNumel - 1))
                              .to(at::kDouble)
                              .mean()
                              .item<double>();
      EXPECT_LT(std::abs(both - share * share),
                6 / std::sqrt(static_cast<double>(kNumel)));
    }
  }
}

// Masters of 16 bits, of values that have the unit beside them: a step by SGD
// from 0 against `-value` makes it.
at::Tensor MastersOf(const at::Tensor& values, NumberType type, Isa isa,
                     int64_t piece) {
  const at::Tensor masters =
      torch::zeros(values.sizes(),
                   type == NumberType::kBFloat16 ? at::kBFloat16 : at::kHalf);
  const at::Tensor gradient = values.neg();
  StepRange range;
  range.master = masters.data_ptr();
  range.master_type = type;
  range.gradient = gradient.const_data_ptr();
  range.numel = values.numel();
  const auto k = CoefficientsOf({.lr = 1, .algorithm = Algorithm::kSgd}, 1, 1,
                                SeedOf(1, 1));
  for (int64_t begin = 0; begin < range.numel; begin += piece) {
    StepElements(Formula::kSgd,
                 Part(range, begin, std::min(begin + piece, range.numel)), k,
                 isa);
  }
  return masters;
}

TEST(NarrowMastersTest, InstructionSetsAndCutsHaveTheSameBits) {
  const at::Tensor values = GradientOf(5000, 1);
  for (const NumberType type : {NumberType::kBFloat16, NumberType::kFloat16}) {
    const at::Tensor whole = MastersOf(values, type, Isa::kPortable, 5000);
    for (const Isa isa : Isas()) {
      for (const int64_t piece : {5000, 1009, 64, 29}) {
        EXPECT_TRUE(torch::equal(MastersOf(values, type, isa, piece), whole))
            << IsaName(isa) << " " << piece;
      }
    }
  }
}

// As states are, below; in float16 subnormal numbers, too, and what is less
// than the least of them.
TEST(NarrowMastersTest, AreRoundedWithoutBias) {
  constexpr int64_t kNumel = 1 << 16;
  for (const Isa isa : Isas()) {
    for (const NumberType type :
         {NumberType::kBFloat16, NumberType::kFloat16}) {
      for (const float value : {1.0003f, -0.7001f, 3.1e-5f, -7.3e-7f, 1e-8f}) {
        const at::Tensor held =
            MastersOf(torch::full({kNumel}, value), type, isa, kNumel)
                .to(at::kDouble);
        const bool half = type == NumberType::kFloat16;
        const double unit = std::max(
            std::abs(value) * (half ? 0x1p-10 : 0x1p-7), half ? 0x1p-24 : 0);
        EXPECT_LT(std::abs(held.mean().item<double>() - value),
                  6 * unit / 2 / std::sqrt(static_cast<double>(kNumel)))
            << value << " " << half;
        EXPECT_LE((held - value).abs().max().item<double>(), unit);
        EXPECT_GT(held.max().item<double>(), held.min().item<double>());
      }
    }
  }
}

TEST(NarrowMastersTest, WhatIsTooLargeOrNoNumberStaysSo) {
  const float inf = std::numeric_limits<float>::infinity();
  const at::Tensor values = torch::tensor({1e5f, -1e5f, inf, std::nanf("")});
  const at::Tensor half =
      MastersOf(values, NumberType::kFloat16, BestIsa(), 4).to(at::kFloat);
  EXPECT_TRUE(
      torch::equal(half.slice(0, 0, 3), torch::tensor({inf, -inf, inf})));
  EXPECT_TRUE(std::isnan(half[3].item<float>()));
}

TEST(StateTypesTest, RandomBitsAreOfTheStepTheParameterAndTheElement) {
  constexpr int64_t kNumel = 640;
  const at::Tensor gradient = torch::full({kNumel}, 1.003f);
  OptimizerOptions take;
  take.beta1 = 0;
  const auto held = [&](int64_t parameter, int64_t step, int64_t number) {
    Memory m(kNumel, NumberType::kBFloat16);
    StepRange range = m.Range(gradient);
    range.number = number;
    StepElements(kFormula, range,
                 CoefficientsOf(take, 1, 1, SeedOf(parameter, step)));
    return m.states[0].view(at::kBFloat16).to(at::kFloat);
  };
  const at::Tensor one = held(0, 1, 0);
  EXPECT_TRUE(one.equal(held(0, 1, 0)));
  // Others: where the two roundings are as good as independent, a share of
  // p^2 + (1 - p)^2 is the same; all would be if something were left out.
  for (const at::Tensor& other : {held(1, 1, 0), held(0, 2, 0), held(0, 1, 640),
                                  held(0, 1, int64_t{1} << 32)}) {
    EXPECT_FALSE(one.equal(other));
  }
  // By their number in the parameter.
  EXPECT_TRUE(one.slice(0, 64).equal(held(0, 1, 64).slice(0, 0, 576)));
}

// ---- 8 bits

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
    Memory m(kNumel, NumberType::kBlock8);
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
      Memory m(kNumel, NumberType::kBlock8);
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
  for (const NumberType type : kTypes) {
    Memory m(kNumel, type);
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
  Memory m(kNumel, NumberType::kBlock8);
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
      Memory m(numel, NumberType::kBlock8);
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

// Of ranges that begin within a block; an empty one does nothing.
TEST(StateTypesTest, Block8HasTheSameBitsWherePartsOfABlockAreStepped) {
  const at::Tensor gradient = GradientOf(200, 1);
  const auto stepped = [&](Isa isa) {
    const Memory m(200, NumberType::kBlock8);
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
      Memory m(192, NumberType::kBlock8);
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
    Memory m(200, NumberType::kBlock8);
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

// ---- a training

// A linear regression, from zeros: the loss after 300 steps. Few bits of the
// moments must cost little of it.
double LossAfterTraining(NumberType type) {
  constexpr int64_t kFeatures = 256, kSamples = 512;
  torch::manual_seed(11);
  const at::Tensor x = torch::randn({kSamples, kFeatures}),
                   goal = torch::randn({kFeatures}), y = x.matmul(goal);
  Memory m(kFeatures, type);
  double loss = 0;
  for (int step = 1; step <= 300; ++step) {
    const at::Tensor off = x.matmul(m.master) - y;
    loss = off.square().mean().item<double>();
    const at::Tensor gradient =
        x.t().matmul(off).mul(2.0 / kSamples).contiguous();
    StepElements(kFormula, m.Range(gradient),
                 CoefficientsOf({.lr = 2e-2}, step, 1, SeedOf(0, step)));
  }
  return loss;
}

TEST(StateTypesTest, TrainsAsFloat32Does) {
  const double wide = LossAfterTraining(NumberType::kFloat32);
  for (const NumberType type : kTypes) {
    const double loss = LossAfterTraining(type);
    RecordProperty(absl::StrCat("loss_", static_cast<int>(type)),
                   absl::StrCat(loss, " of ", wide));
    // From 256 to about this: a thousandth of the way.
    EXPECT_LT(loss, wide + 0.256) << static_cast<int>(type);
  }
}

}  // namespace
}  // namespace tessera
