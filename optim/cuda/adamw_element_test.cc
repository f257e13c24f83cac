// The functions of the GPU's AdamW, on the CPU, against AdamWUpdate.
#include "optim/cuda/adamw_element.h"

#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace tessera {
namespace {

constexpr uint32_t kSpecial[] = {
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x807fffff,
    0x00800000, 0x80800000, 0x3f800000, 0xbf800000, 0x34000000, 0x7f7fffff,
    0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000, 0x7f800001,
    0x7fc12345, 0x1f7fffff, 0x20000000, 0x5f7fffff, 0x5f800000};
constexpr size_t kNumSpecial = sizeof(kSpecial) / sizeof(kSpecial[0]);

struct State {
  explicit State(size_t n)
      : master(n), exp_avg(n), exp_avg_sq(n), gradient(n) {}
  AdamWRange Range() {
    AdamWRange r;
    r.master = master.data();
    r.exp_avg = exp_avg.data();
    r.exp_avg_sq = exp_avg_sq.data();
    r.gradient = gradient.data();
    r.numel = static_cast<int64_t>(master.size());
    return r;
  }
  std::vector<float> master, exp_avg, exp_avg_sq, gradient;
};

// In turns: as in a training; any bits; special values in all combinations.
State MakeState(size_t numel, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  State s(numel);
  for (size_t i = 0; i < numel; ++i) {
    float x[4];
    size_t k = i / 3;
    for (float& value : x) {
      value = i % 3 == 0   ? normal(random)
              : i % 3 == 1 ? BitCast<float>(static_cast<uint32_t>(random()))
                           : BitCast<float>(kSpecial[k % kNumSpecial]);
      k /= kNumSpecial;
    }
    const bool plain = i % 3 == 0;
    s.master[i] = x[0];
    s.exp_avg[i] = plain ? x[1] * 0.1f : x[1];
    s.exp_avg_sq[i] = plain ? x[2] * x[2] * 0.01f : x[2];
    s.gradient[i] = x[3];
  }
  return s;
}

std::vector<AdamWCoefficients> Cases() {
  return {
      CoefficientsOf({}, 1),
      CoefficientsOf({.lr = 1e-2, .weight_decay = 0.1}, 2),
      CoefficientsOf({.lr = 3e-4, .beta2 = 0.95, .weight_decay = 0.3}, 1000,
                     0.37),
      CoefficientsOf({.beta1 = 0.3, .weight_decay = 0.01}, 7),
      CoefficientsOf({.beta1 = 0.5, .beta2 = 0.5}, 3, 1.0 / 65536),
      CoefficientsOf({.beta1 = 0, .beta2 = 0, .eps = 1e-3}, 1, 3),
      CoefficientsOf({.lr = 0.1, .eps = 0, .weight_decay = 1}, 100'000),
      CoefficientsOf({.lr = 0, .weight_decay = 0.1}, 20'000'000),
      CoefficientsOf({.lr = 1e5, .eps = 1e-38, .weight_decay = 1e-9}, 5, 1e30),
  };
}

TEST(AdamWElementTest, HasTheBitsOfAdamWUpdate) {
  unsigned seed = 1;
  for (const AdamWCoefficients& c : Cases()) {
    const State before = MakeState(900'000, seed++);
    State after = before;
    AdamWUpdate(after.Range(), c);
    const AdamWConstants constants(c);
    for (size_t i = 0; i < before.master.size(); ++i) {
      const AdamWElement x =
          AdamWStep({before.master[i], before.exp_avg[i], before.exp_avg_sq[i]},
                    before.gradient[i], constants);
      const auto same = [](float a, float b) {
        return BitCast<uint32_t>(a) == BitCast<uint32_t>(b);
      };
      ASSERT_TRUE(same(x.master, after.master[i]) &&
                  same(x.exp_avg, after.exp_avg[i]) &&
                  same(x.exp_avg_sq, after.exp_avg_sq[i]))
          << "case " << seed << ", element " << i << ": " << x.master << " "
          << x.exp_avg << " " << x.exp_avg_sq << ", not " << after.master[i]
          << " " << after.exp_avg[i] << " " << after.exp_avg_sq[i];
    }
  }
}

// Every upper half of a float with lower ones around the middles of both 16-bit
// types. A rate of 0 keeps the masters.
TEST(AdamWElementTest, WorkingCopiesAreThoseOfAdamWUpdate) {
  std::vector<float> values;
  for (uint32_t high = 0; high < 1 << 16; ++high) {
    for (uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x3000u,
                         0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(BitCast<float>(high << 16 | low));
    }
  }
  for (const WorkingType type :
       {WorkingType::kBFloat16, WorkingType::kFloat16}) {
    State s(values.size());
    s.master = values;
    std::vector<uint16_t> working(values.size());
    AdamWRange range = s.Range();
    range.working_type = type;
    range.working = working.data();
    AdamWUpdate(range, CoefficientsOf({.lr = 0}, 1));
    for (size_t i = 0; i < values.size(); ++i) {
      const uint16_t bits = type == WorkingType::kBFloat16
                                ? BFloat16BitsOf(s.master[i])
                                : Float16BitsOf(s.master[i]);
      ASSERT_EQ(bits, working[i])
          << static_cast<int>(type) << " " << BitCast<uint32_t>(values[i]);
    }
  }
}

}  // namespace
}  // namespace tessera
