// The functions of the GPU's step, on the CPU, against StepElements.
#include "optim/cuda/step_element.h"

#include <torch/torch.h>

#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "optim/cuda/step_testing.h"

namespace tessera {
namespace {

constexpr uint32_t kSpecial[] = {
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x807fffff,
    0x00800000, 0x80800000, 0x3f800000, 0xbf800000, 0x34000000, 0x7f7fffff,
    0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000, 0x7f800001,
    0x7fc12345, 0x1f7fffff, 0x20000000, 0x5f7fffff, 0x5f800000};
constexpr size_t kNumSpecial = sizeof(kSpecial) / sizeof(kSpecial[0]);

// In turns: as in a training; any bits; special values.
at::Tensor AnyValues(int64_t numel) {
  static std::mt19937 random(1);
  std::normal_distribution<float> normal;
  at::Tensor values = torch::empty({numel});
  float* const x = values.data_ptr<float>();
  for (int64_t i = 0; i < numel; ++i) {
    x[i] = i % 3 == 0   ? normal(random)
           : i % 3 == 1 ? BitCast<float>(static_cast<uint32_t>(random()))
                        : BitCast<float>(kSpecial[random() % kNumSpecial]);
  }
  return values;
}

constexpr Formula kFormulas[] = {Formula::kAdamW,
                                 Formula::kAdamWAmsGrad,
                                 Formula::kAdam,
                                 Formula::kAdamAmsGrad,
                                 Formula::kSgd,
                                 Formula::kSgdMomentum,
                                 Formula::kAdagrad,
                                 Formula::kRmsProp,
                                 Formula::kRmsPropMomentum,
                                 Formula::kRmsPropCentered,
                                 Formula::kRmsPropCenteredMomentum,
                                 Formula::kLion,
                                 Formula::kScheduleFree};

StepCoefficients SomeCoefficients(Formula formula) {
  OptimizerOptions o = {.lr = 1e-2, .weight_decay = 0.1};
  const auto of = [&](std::initializer_list<Formula> all) {
    return std::find(all.begin(), all.end(), formula) != all.end();
  };
  if (of({Formula::kAdam, Formula::kAdamAmsGrad})) {
    o.algorithm = Algorithm::kAdam;
  } else if (of({Formula::kSgd, Formula::kSgdMomentum})) {
    o.algorithm = Algorithm::kSgd;
  } else if (of({Formula::kAdagrad})) {
    o.algorithm = Algorithm::kAdagrad;
  } else if (of({Formula::kLion})) {
    o.algorithm = Algorithm::kLion;
  } else if (of({Formula::kScheduleFree})) {
    o.algorithm = Algorithm::kScheduleFree;
    o.average_share = 0.3;
  } else if (!of({Formula::kAdamW, Formula::kAdamWAmsGrad})) {
    o.algorithm = Algorithm::kRmsProp;
  }
  o.momentum = 0.9;
  o.nesterov = true;
  return CoefficientsOf(o, 3, 0.37, SeedOf(2, 3));
}

template <typename T>
std::vector<T> Bits(const at::Tensor& t) {
  std::vector<T> bits(t.nbytes() / sizeof(T));
  std::memcpy(bits.data(), t.const_data_ptr(), t.nbytes());
  return bits;
}

template <typename T, typename Word>
void ExpectSameSteps(Formula formula, NumberType type) {
  constexpr int64_t kNumel = 30'000;
  StepTypes types;
  types.master = types.states = types.gradient = type;
  const StepOperands before(formula, kNumel, types, AnyValues);
  StepOperands after = before.To(at::kCPU);
  const StepCoefficients c = SomeCoefficients(formula);
  StepElements(formula, after.Range(), c);
  const StepConstants<T> constants(c);
  const auto masters = Bits<Word>(after.master);
  for (int64_t i = 0; i < kNumel; ++i) {
    StepElement<T> e;
    e.master.x = before.master.const_data_ptr<T>()[i];
    for (size_t s = 0; s < before.states.size(); ++s) {
      e.states[s].x = before.states[s].const_data_ptr<T>()[i];
    }
    const T gradient = before.gradient.const_data_ptr<T>()[i];
    VisitFormula(formula, [&](auto f) {
      StepOneElement<decltype(f)>(constants, gradient, &e);
    });
    ASSERT_EQ(BitCast<Word>(e.master.x), masters[static_cast<size_t>(i)])
        << NameOf(formula) << " " << i;
    for (size_t s = 0; s < before.states.size(); ++s) {
      const T expected = after.states[s].const_data_ptr<T>()[i];
      ASSERT_EQ(BitCast<Word>(e.states[s].x), BitCast<Word>(expected))
          << NameOf(formula) << " " << i;
    }
  }
}

TEST(StepElementTest, HasTheBitsOfStepElements) {
  for (const Formula formula : kFormulas) {
    ExpectSameSteps<float, uint32_t>(formula, NumberType::kFloat32);
    ExpectSameSteps<double, uint64_t>(formula, NumberType::kFloat64);
  }
}

// Every upper half of a float with lower ones around the middles of both 16-bit
// types. A rate of 0 keeps the masters.
TEST(StepElementTest, WorkingCopiesAreThoseOfStepElements) {
  std::vector<float> values;
  for (uint32_t high = 0; high < 1 << 16; ++high) {
    for (uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x3000u,
                         0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(BitCast<float>(high << 16 | low));
    }
  }
  for (const NumberType type : {NumberType::kBFloat16, NumberType::kFloat16}) {
    StepTypes types;
    types.working = type;
    StepOperands m(Formula::kAdamW, static_cast<int64_t>(values.size()), types,
                   [](int64_t n) { return torch::zeros({n}); });
    std::memcpy(m.master.data_ptr(), values.data(), m.master.nbytes());
    StepElements(Formula::kAdamW, m.Range(), CoefficientsOf({.lr = 0}, 1));
    const auto working = Bits<uint16_t>(m.working);
    for (size_t i = 0; i < values.size(); ++i) {
      const float master = m.master.const_data_ptr<float>()[i];
      ASSERT_EQ(type == NumberType::kBFloat16 ? BFloat16BitsOf(master)
                                              : Float16BitsOf(master),
                working[i])
          << static_cast<int>(type) << " " << BitCast<uint32_t>(values[i]);
    }
  }
}

TEST(StepElementTest, NarrowMastersAreThoseOfStepElements) {
  constexpr int64_t kNumel = 30'000;
  for (const NumberType type : {NumberType::kBFloat16, NumberType::kFloat16}) {
    StepTypes types;
    types.master = type;
    const StepOperands before(Formula::kSgd, kNumel, types, AnyValues);
    StepOperands after = before.To(at::kCPU);
    const StepCoefficients c = SomeCoefficients(Formula::kSgd);
    StepRange range = after.Range();
    range.number = (int64_t{1} << 32) - 5000;
    StepElements(Formula::kSgd, range, c);
    const StepConstants<float> constants(c);
    const auto old = Bits<uint16_t>(before.master);
    const auto masters = Bits<uint16_t>(after.master);
    for (size_t i = 0; i < kNumel; ++i) {
      StepElement<float> e;
      e.master.x = type == NumberType::kBFloat16 ? FloatOfBFloat16(old[i])
                                                 : FloatOfFloat16(old[i]);
      VisitFormula(Formula::kSgd, [&](auto f) {
        StepOneElement<decltype(f)>(
            constants, before.gradient.const_data_ptr<float>()[i], &e);
      });
      ASSERT_EQ(
          NarrowMasterBitsOf(e.master.x, type,
                             static_cast<uint64_t>(range.number) + i, c.seed),
          masters[i])
          << static_cast<int>(type) << " " << i << " " << e.master.x;
    }
  }
}

TEST(StepElementTest, RemaindersAreThoseOfStepElements) {
  constexpr int64_t kNumel = 30'000;
  StepTypes types;
  types.master = NumberType::kRemainder;
  types.working = NumberType::kBFloat16;
  const StepOperands before(Formula::kSgd, kNumel, types, AnyValues);
  StepOperands after = before.To(at::kCPU);
  const StepCoefficients c = SomeCoefficients(Formula::kSgd);
  StepElements(Formula::kSgd, after.Range(), c);
  const StepConstants<float> constants(c);
  const auto old = Bits<uint16_t>(before.master);
  const auto old_working = Bits<uint16_t>(before.working);
  const auto masters = Bits<uint16_t>(after.master);
  const auto working = Bits<uint16_t>(after.working);
  for (size_t i = 0; i < kNumel; ++i) {
    StepElement<float> e;
    e.master.x = JoinedMasterOf(old_working[i], old[i]);
    VisitFormula(Formula::kSgd, [&](auto f) {
      StepOneElement<decltype(f)>(
          constants, before.gradient.const_data_ptr<float>()[i], &e);
    });
    ASSERT_EQ(RemainderBitsOf(e.master.x), masters[i]) << i;
    ASSERT_EQ(UpperBitsOf(e.master.x), working[i]) << i;
    const float joined = JoinedMasterOf(working[i], masters[i]);
    ASSERT_EQ(BitCast<uint32_t>(joined), BitCast<uint32_t>(e.master.x)) << i;
  }
}

TEST(StepElementTest, Reads16BitsAsTheyAre) {
  const at::Tensor every = torch::arange(-32768, 32768).to(at::kShort);
  const auto halves = Bits<uint16_t>(every);
  const at::Tensor wide = every.view(at::kHalf).to(at::kFloat);
  for (size_t i = 0; i < halves.size(); ++i) {
    const float expected = wide.const_data_ptr<float>()[i];
    if (expected != expected) continue;
    ASSERT_EQ(BitCast<uint32_t>(FloatOfFloat16(halves[i])),
              BitCast<uint32_t>(expected));
  }
}

// States of one value each (no decay of either): what memory holds of them.
StepCoefficients TakeGradient(uint64_t seed) {
  OptimizerOptions take;
  take.beta1 = take.beta2 = 0;
  return CoefficientsOf(take, 1, 1, seed);
}

TEST(StepElementTest, RoundsStatesOf16BitsAsStepElementsDoes) {
  constexpr int64_t kNumel = 5000;
  StepTypes types;
  types.states = NumberType::kBFloat16;
  StepOperands m(Formula::kAdamW, kNumel, types,
                 [](int64_t n) { return torch::randn({n}); });
  const uint64_t seed = SeedOf(5, 7);
  StepRange range = m.Range();
  range.number = (int64_t{1} << 32) - 1234;  // both halves of numbers
  StepElements(Formula::kAdamW, range, TakeGradient(seed));
  for (int s = 0; s < 2; ++s) {
    const auto held = Bits<uint16_t>(m.states[static_cast<size_t>(s)]);
    for (int64_t i = 0; i < kNumel; ++i) {
      const float g = m.gradient.const_data_ptr<float>()[i];
      const uint32_t random =
          RandomBitsOf(static_cast<uint64_t>(range.number + i), seed);
      ASSERT_EQ(held[static_cast<size_t>(i)],
                BFloat16StateBitsOf(s == 0 ? g : Times(g, g), s, random))
          << s << " " << i;
    }
  }
}

TEST(StepElementTest, CodesOf8BitsAreThoseOfStepElements) {
  constexpr int64_t kNumel = 64 * 400;
  StepTypes types;
  types.states = NumberType::kBlock8;
  StepOperands m(Formula::kAdamW, kNumel, types, [](int64_t n) {
    return torch::randn({n}) * torch::exp2(torch::empty({n}).uniform_(-40, 0));
  });
  const uint64_t seed = SeedOf(5, 7);
  StepRange range = m.Range();
  range.number = (int64_t{1} << 32) - 1234;
  StepElements(Formula::kAdamW, range, TakeGradient(seed));
  for (int s = 0; s < 2; ++s) {
    const auto bytes = Bits<uint8_t>(m.states[static_cast<size_t>(s)]);
    for (int64_t b = 0; b < kNumel / 64; ++b) {
      uint32_t most = kBlock8LeastScale;
      std::vector<uint32_t> words;
      for (int64_t j = 0; j < 64; ++j) {
        const int64_t i = b * 64 + j;
        const float g = m.gradient.const_data_ptr<float>()[i];
        words.push_back(Block8WordOf(
            s == 0 ? g : Times(g, g), s,
            RandomBitsOf(static_cast<uint64_t>(range.number + i), seed)));
        most = std::max(most, words.back() & 0x7fffffff);
      }
      uint32_t scale;
      std::memcpy(&scale, bytes.data() + b * 68 + 64, sizeof(scale));
      ASSERT_EQ(scale, Block8ScaleOf(most));
      for (int64_t j = 0; j < 64; ++j) {
        ASSERT_EQ(bytes[static_cast<size_t>(b * 68 + j)],
                  Block8CodeOf(words[static_cast<size_t>(j)], scale, s == 1))
            << s << " " << b << " " << j;
      }
    }
  }
  // And back: what a step that keeps them would step with, by codes that are
  // made of it again.
  for (int code = 0; code < 256; ++code) {
    for (const bool non_negative : {false, true}) {
      const auto c = static_cast<uint8_t>(code);
      const auto one = BitCast<uint32_t>(1.f);
      const float value = Block8ValueOf(c, one, non_negative);
      const uint8_t again =
          Block8CodeOf(Block8WordOf(value, 0, 0xfffff), one, non_negative);
      EXPECT_EQ(again, c);
    }
  }
}

}  // namespace
}  // namespace tessera
