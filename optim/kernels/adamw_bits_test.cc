// StepElements of AdamW: against libtorch's fused one, against the formula
// element by element, and against itself: instruction sets, places, lengths. Of
// all formulas: formulas_test.cc.

#include <ATen/Version.h>
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "optim/algorithms/coefficients.h"
#include "optim/kernels/element_step.h"

namespace tessera {
namespace {

using Floats = std::vector<float>;

constexpr size_t kNumel = 1 << 18;  // whole vectors

uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
float FloatOf(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
float OneNan(float x) { return std::isnan(x) ? FloatOf(0x7fc00000) : x; }

struct State {
  explicit State(size_t n)
      : master(n), exp_avg(n), exp_avg_sq(n), gradient(n) {}
  size_t numel() const { return master.size(); }
  StepRange Range() {
    StepRange r;
    r.master = master.data();
    r.states[0] = exp_avg.data();
    r.states[1] = exp_avg_sq.data();
    r.gradient = gradient.data();
    r.numel = static_cast<int64_t>(numel());
    return r;
  }
  Floats master, exp_avg, exp_avg_sq, gradient;
};

// The first element whose bits differ, where all NaN are one; "" if none does.
std::string Difference(const State& a, const State& b) {
  const auto of = [](const char* name, const Floats& x, const Floats& y) {
    for (size_t i = 0; i < x.size(); ++i) {
      if (BitsOf(OneNan(x[i])) == BitsOf(OneNan(y[i]))) continue;
      return absl::StrCat(name, "[", i, "]: ", x[i], " and ", y[i], ", bits ",
                          absl::Hex(BitsOf(x[i])), " and ",
                          absl::Hex(BitsOf(y[i])));
    }
    return std::string();
  };
  std::string differs = of("exp_avg", a.exp_avg, b.exp_avg);
  if (differs.empty()) differs = of("exp_avg_sq", a.exp_avg_sq, b.exp_avg_sq);
  if (differs.empty()) differs = of("master", a.master, b.master);
  return differs;
}

constexpr uint32_t kSpecial[] = {
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x807fffff,
    0x00800000, 0x80800000, 0x3f800000, 0xbf800000, 0x34000000, 0x7f7fffff,
    0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000, 0x7f800001,
    0x7fc12345, 0x1f7fffff, 0x20000000, 0x5f7fffff, 0x5f800000};
constexpr size_t kNumSpecial = sizeof(kSpecial) / sizeof(kSpecial[0]);

// In turns: as in a training; any bits; special values, in all combinations
// over four states whose seeds follow each other.
State MakeState(size_t numel, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  State s(numel);
  for (size_t i = 0; i < numel; ++i) {
    float x[4];
    size_t k = i / 3 + seed * (kNumel / 3);
    for (float& value : x) {
      value = i % 3 == 0   ? normal(random)
              : i % 3 == 1 ? FloatOf(static_cast<uint32_t>(random()))
                           : FloatOf(kSpecial[k % kNumSpecial]);
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

struct Case {
  const char* name;
  OptimizerOptions options;
  int64_t step;
  double factor;
};
std::vector<Case> Cases() {
  return {
      {"defaults", {}, 1, 1},
      {"decay", {.lr = 1e-2, .weight_decay = 0.1}, 2, 1},
      {"scaled", {.lr = 3e-4, .beta2 = 0.95, .weight_decay = 0.3}, 1000, 0.37},
      {"lerp from gradient", {.beta1 = 0.3, .weight_decay = 0.01}, 7, 1},
      {"lerp at the middle", {.beta1 = 0.5, .beta2 = 0.5}, 3, 1.0 / 65536},
      {"no momentum", {.beta1 = 0, .beta2 = 0, .eps = 1e-3}, 1, 3},
      {"no epsilon", {.lr = 0.1, .eps = 0, .weight_decay = 1}, 100'000, 1},
      {"no rate", {.lr = 0, .weight_decay = 0.1}, 20'000'000, 1},
      {"large", {.lr = 1e5, .eps = 1e-38, .weight_decay = 1e-9}, 5, 1e30},
  };
}

std::vector<Isa> Isas() {
  std::vector<Isa> isas = {Isa::kPortable};
  if (BestIsa() >= Isa::kAvx2) isas.push_back(Isa::kAvx2);
  if (BestIsa() >= Isa::kAvx512) isas.push_back(Isa::kAvx512);
  return isas;
}

State Updated(State s, const Case& c, Isa isa) {
  StepElements(Formula::kAdamW, s.Range(),
               CoefficientsOf(c.options, c.step, c.factor), isa);
  return s;
}

// The formula of the header, with std::fma.
State ByFormula(State s, const Case& c) {
  const OptimizerOptions& o = c.options;
  const auto rounded = [](double x) { return static_cast<float>(x); };
  const double steps = static_cast<double>(c.step);
  const float weight = rounded(1 - o.beta1), square = rounded(1 - o.beta2),
              root = rounded(std::sqrt(1 - std::pow(o.beta2, steps))),
              rate = rounded(-(o.lr / (1 - std::pow(o.beta1, steps))));
  const float decay =
      o.weight_decay == 0 ? 1.f : rounded(1 - o.lr * o.weight_decay);
  for (size_t i = 0; i < s.numel(); ++i) {
    const float g = s.gradient[i] * rounded(c.factor);
    float& m = s.exp_avg[i];
    float& v = s.exp_avg_sq[i];
    const float difference = g - m;
    m = weight < 0.5f ? std::fma(weight, difference, m)
                      : std::fma(weight - 1.f, difference, g);
    const float decayed = v * rounded(o.beta2), part = g * square;
    v = std::fma(g, part, decayed);
    const float normal = std::sqrt(v) / root;
    const float denominator = normal + rounded(o.eps);
    const float scaled = rate * m;
    const float quotient = scaled / denominator;
    const float kept = s.master[i] * decay;
    s.master[i] = kept + quotient;
  }
  return s;
}

at::Tensor TensorOf(Floats& values) {
  return torch::from_blob(values.data(), {static_cast<int64_t>(values.size())});
}

State ByLibtorch(State s, const Case& c) {
  const OptimizerOptions& o = c.options;
  at::Tensor gradient = TensorOf(s.gradient);
  if (c.factor != 1) gradient = gradient.mul(c.factor);
  at::_fused_adamw_({TensorOf(s.master)}, {gradient}, {TensorOf(s.exp_avg)},
                    {TensorOf(s.exp_avg_sq)}, {},
                    {torch::full({}, static_cast<double>(c.step))}, o.lr,
                    o.beta1, o.beta2, o.weight_decay, o.eps, false, false);
  return s;
}

TEST(AdamWBitsTest, HasTheBitsOfLibtorchsVectorisedBody) {
  const std::string capability = at::get_cpu_capability();
  if (capability != "AVX2" && capability != "AVX512") {
    GTEST_SKIP() << "libtorch runs without FMA here: " << capability;
  }
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  unsigned seed = 1;
  for (const Case& c : Cases()) {
    const State s = MakeState(kNumel, seed++);
    const State expected = ByLibtorch(s, c);
    for (Isa isa : Isas()) {
      EXPECT_EQ(Difference(Updated(s, c, isa), expected), "")
          << c.name << " " << IsaName(isa);
    }
  }
  at::set_num_threads(threads);
}

TEST(AdamWBitsTest, HasTheBitsOfTheFormula) {
  unsigned seed = 20;
  for (const Case& c : Cases()) {
    const State s = MakeState(kNumel, seed++);
    const State expected = ByFormula(s, c);
    for (Isa isa : Isas()) {
      EXPECT_EQ(Difference(Updated(s, c, isa), expected), "")
          << c.name << " " << IsaName(isa);
    }
  }
}

// exp_avg is odd in its last bit, and what is added is half of that bit except
// for 2^-30 of it: it stays. A sum rounded to float64 lies in the middle, from
// where it would go to the even neighbour.
TEST(AdamWBitsTest, FusesWithOneRounding) {
  const Case c = {"", {.beta1 = 1 - 0x1p-16 * (1 + 0x1p-15)}, 1, 1};
  const float odd = 1 + 0x1p-23f, difference = 0x1p-8f * (1 - 0x1p-15f);
  State s(0);
  for (int exponent = -40; exponent <= 40; ++exponent) {
    for (float sign : {-1.f, 1.f}) {
      for (float direction : {-1.f, 1.f}) {
        const float scale = std::ldexp(sign, exponent);
        s.exp_avg.push_back(scale * odd);
        s.gradient.push_back(scale * (odd + direction * difference));
      }
    }
  }
  s.master.resize(s.exp_avg.size());
  s.exp_avg_sq.resize(s.exp_avg.size());
  for (Isa isa : Isas()) {
    const State updated = Updated(s, c, isa);
    EXPECT_EQ(updated.exp_avg, s.exp_avg) << IsaName(isa);
    EXPECT_EQ(Difference(updated, ByFormula(s, c)), "") << IsaName(isa);
  }
}

TEST(AdamWBitsTest, WritesOneNan) {
  const Case c = Cases()[1];
  for (Isa isa : Isas()) {
    const State s = Updated(MakeState(3000, 40), c, isa);
    int found = 0;
    for (const Floats* values : {&s.master, &s.exp_avg, &s.exp_avg_sq}) {
      for (float x : *values) {
        if (!std::isnan(x)) continue;
        ++found;
        ASSERT_EQ(BitsOf(x), 0x7fc00000) << IsaName(isa);
      }
    }
    EXPECT_GT(found, 100);
  }
}

// Every length at every place, with what lies around it.
TEST(AdamWBitsTest, AnElementDoesNotDependOnItsPlace) {
  constexpr size_t kAround = 20;
  const Case c = Cases()[2];
  const State all = MakeState(150, 50);
  const State whole = ByFormula(all, c);
  for (Isa isa : Isas()) {
    for (size_t begin = 0; begin < 2 * kAround; ++begin) {
      for (size_t numel = 0; numel <= 3 * kAround; ++numel) {
        State s = all, expected = all;
        for (size_t i = begin; i < begin + numel; ++i) {
          expected.master[i] = whole.master[i];
          expected.exp_avg[i] = whole.exp_avg[i];
          expected.exp_avg_sq[i] = whole.exp_avg_sq[i];
        }
        StepElements(Formula::kAdamW,
                     Part(s.Range(), static_cast<int64_t>(begin),
                          static_cast<int64_t>(begin + numel)),
                     CoefficientsOf(c.options, c.step, c.factor), isa);
        ASSERT_EQ(Difference(s, expected), "")
            << IsaName(isa) << " " << begin << " + " << numel;
      }
    }
  }
}

TEST(AdamWBitsTest, OldMastersStayWhereNewOnesGoElsewhere) {
  const Case c = Cases()[2];
  const State start = MakeState(100, 55);
  for (Isa isa : Isas()) {
    for (int64_t numel = 0; numel <= 50; ++numel) {
      State s = start, expected = start;
      Floats elsewhere(start.numel(), 7);
      StepRange range = s.Range();
      range.new_master = elsewhere.data();
      const StepCoefficients with = CoefficientsOf(c.options, c.step, c.factor);
      StepElements(Formula::kAdamW, Part(range, 7, 7 + numel), with, isa);
      StepElements(Formula::kAdamW, Part(expected.Range(), 7, 7 + numel), with,
                   isa);
      ASSERT_EQ(std::memcmp(s.master.data(), start.master.data(),
                            start.numel() * sizeof(float)),
                0);
      for (size_t i = 0; i < start.numel(); ++i) {
        const auto at = static_cast<int64_t>(i);
        const bool in = at >= 7 && at < 7 + numel;
        ASSERT_EQ(BitsOf(elsewhere[i]), BitsOf(in ? expected.master[i] : 7.f))
            << IsaName(isa) << " " << numel << " " << i;
      }
      s.master = expected.master;
      ASSERT_EQ(Difference(s, expected), "") << IsaName(isa) << " " << numel;
    }
  }
}

// ---- working copies

struct Working {
  NumberType type;
  at::ScalarType dtype;
};
constexpr Working kWorking[] = {{NumberType::kFloat32, at::kFloat},
                                {NumberType::kBFloat16, at::kBFloat16},
                                {NumberType::kFloat16, at::kHalf}};

std::string Bytes(const at::Tensor& t) {
  return std::string(static_cast<const char*>(t.const_data_ptr()), t.nbytes());
}

// A state whose masters become `values`: nothing else moves them.
State StateOf(const Floats& values) {
  State s(values.size());
  s.master = values;
  return s;
}

// Every upper half of a float with lower ones around the middles of both
// 16-bit types, through copy_. A rate of 0 keeps the masters.
TEST(AdamWBitsTest, WorkingCopiesAreRoundedAsCopyDoesIt) {
  Floats values;
  for (uint32_t high = 0; high < 1 << 16; ++high) {
    for (uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x3000u,
                         0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(FloatOf(high << 16 | low));
    }
  }
  const State start = StateOf(values);
  const StepCoefficients keep = CoefficientsOf({.lr = 0}, 1);
  for (const Working& w : kWorking) {
    for (Isa isa : Isas()) {
      State s = start;
      at::Tensor working =
          torch::empty({static_cast<int64_t>(s.numel())}, w.dtype);
      StepRange range = s.Range();
      range.working_type = w.type;
      range.working = working.data_ptr();
      StepElements(Formula::kAdamW, range, keep, isa);
      const at::Tensor expected = torch::empty_like(working);
      expected.copy_(TensorOf(s.master));
      EXPECT_TRUE(Bytes(working) == Bytes(expected))
          << IsaName(isa) << " " << c10::toString(w.dtype);
    }
  }
}

TEST(AdamWBitsTest, AWorkingCopyChangesNothingAndStaysInItsRange) {
  const Case c = Cases()[2];
  const State start = MakeState(100, 60);
  for (const Working& w : kWorking) {
    for (Isa isa : Isas()) {
      for (int64_t numel = 0; numel <= 50; ++numel) {
        State s = start;
        // Elements 7 .. 7 + numel of it are written, the others stay.
        at::Tensor working = torch::full({100}, 7, w.dtype);
        at::Tensor expected = working.clone();
        StepRange range = s.Range();
        range.working_type = w.type;
        range.working = working.data_ptr();
        range = Part(range, 7, 7 + numel);
        StepElements(Formula::kAdamW, range,
                     CoefficientsOf(c.options, c.step, c.factor), isa);
        State without = start;
        StepElements(Formula::kAdamW, Part(without.Range(), 7, 7 + numel),
                     CoefficientsOf(c.options, c.step, c.factor), isa);
        ASSERT_EQ(Difference(s, without), "");
        expected.narrow(0, 7, numel)
            .copy_(TensorOf(s.master).narrow(0, 7, numel));
        ASSERT_TRUE(Bytes(working) == Bytes(expected))
            << IsaName(isa) << " " << c10::toString(w.dtype) << " " << numel;
      }
    }
  }
}

}  // namespace
}  // namespace tessera
