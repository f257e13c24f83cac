// The functions of GPU kernels, on the CPU, against NormSum and ExactSum.
#include "optim/cuda/norm_math.h"

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/bits.h"
#include "gtest/gtest.h"
#include "optim/norm/block_powers.h"
#include "optim/norm/exact_sum.h"
#include "optim/norm/grad_norm.h"

namespace tessera {
namespace {

static_assert(kNormBlockNumel == kNormBlock, "the CPU's blocks");

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kPs[] = {1, 2, kInfinity};
using Words = std::array<uint64_t, kNormWords>;

template <typename T>
void AddBatch(const NormBatch<T>& batch, int64_t begin, int64_t step, double p,
              Words* words) {
  switch (NormPowerOf(p)) {
    case NormPower::kOne:
      return AddToNormOnHost<NormPower::kOne>(batch, begin, step,
                                              words->data());
    case NormPower::kTwo:
      return AddToNormOnHost<NormPower::kTwo>(batch, begin, step,
                                              words->data());
    case NormPower::kInfinity:
      return AddToNormOnHost<NormPower::kInfinity>(batch, begin, step,
                                                   words->data());
  }
}

template <typename T>
void AddAs(const at::Tensor& segment, int64_t first, double p, Words* words) {
  NormBatch<T> batch;
  batch.Add({segment.const_data_ptr<T>(), segment.numel(), first});
  AddBatch(batch, 0, 1, p, words);
}

void Add(const at::Tensor& segment, int64_t first, double p, Words* words) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, segment.scalar_type(), "Add",
      [&] { AddAs<scalar_t>(segment, first, p, words); });
}

// As NormSum::Serialize begins.
std::string TextOf(const Words& words, double p) {
  std::string digits;
  for (int i = kNormDigits - 1; i >= 0; --i) {
    absl::StrAppendFormat(&digits, "%08x", words[i]);
  }
  digits =
      digits.substr(std::min(digits.find_first_not_of('0'), digits.size() - 1));
  return absl::StrCat(HexFloat(p), " ",
                      HexFloat(BitCast<double>(words[kNormDigits])), " ",
                      digits, " ");
}

std::string TextOf(const NormSum& sum) {
  const std::string text = sum.Serialize();
  return text.substr(0, text.rfind(' ') + 1);
}

enum class Values { kNormal, kWide, kAnyBits, kSubnormal, kInfinite, kNan };
constexpr Values kAllValues[] = {Values::kNormal,   Values::kWide,
                                 Values::kAnyBits,  Values::kSubnormal,
                                 Values::kInfinite, Values::kNan};

at::Tensor Make(Values values, int64_t numel, at::ScalarType dtype) {
  if (values == Values::kAnyBits) {
    const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
    return torch::randint(0, 256, {bytes}, at::kByte).view(dtype);
  }
  at::Tensor x = torch::randn({numel}, at::kDouble);
  if (values == Values::kWide) {
    x = x * torch::pow(10.0, torch::randint(-300, 150, {numel}, at::kDouble));
  } else if (values == Values::kSubnormal) {
    x = x * (dtype == at::kDouble ? 0x1p-1060
             : dtype == at::kHalf ? 0x1p-20
                                  : 0x1p-140);
  } else if (values == Values::kInfinite && numel > 0) {
    x[numel / 2] = -kInfinity;
  } else if (values == Values::kNan && numel > 0) {
    x[numel / 3] = -kInfinity;
    x[numel / 2] = -std::nan("");
  }
  return x.to(dtype);
}

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kHalf,
                                      at::kBFloat16};

TEST(NormMathTest, SumsAreThoseOfNormSum) {
  torch::manual_seed(1);
  for (const at::ScalarType dtype : kDtypes) {
    for (const Values values : kAllValues) {
      for (const double p : kPs) {
        NormSum sum(p);
        Words words = {};
        for (const int64_t numel : {0, 1, 7, 63, 64, 65, 1000, 20000}) {
          for (const int64_t first : {0, 1, 63, 64, 1000}) {
            const at::Tensor x = Make(values, numel, dtype);
            sum.Add(x, first);
            Add(x, first, p, &words);
            ASSERT_EQ(TextOf(words, p), TextOf(sum))
                << c10::toString(dtype) << " " << static_cast<int>(values)
                << " " << numel << " " << first;
          }
        }
        EXPECT_EQ(HexFloat(NormOfWords(words.data(), NormPowerOf(p))),
                  HexFloat(sum.Norm()));
      }
    }
  }
}

// Cut between blocks, anywhere.
TEST(NormMathTest, CutsDoNotMatter) {
  torch::manual_seed(2);
  std::mt19937_64 random(2);
  const int64_t numel = 5000, first = 37;
  const at::Tensor x = Make(Values::kWide, numel, at::kFloat);
  for (const double p : kPs) {
    NormSum sum(p);
    sum.Add(x, first);
    for (int round = 0; round < 20; ++round) {
      Words words = {};
      for (int64_t begin = 0; begin < numel;) {
        const int64_t block = (first + begin) / 64 + 1 + random() % 30;
        const int64_t end = std::min(numel, block * 64 - first);
        Add(x.slice(0, begin, end), first + begin, p, &words);
        begin = end;
      }
      ASSERT_EQ(TextOf(words, p), TextOf(sum)) << p;
    }
  }
}

// Each group of threads takes every n-th block of all segments.
TEST(NormMathTest, ABatchIsItsSegments) {
  torch::manual_seed(3);
  constexpr int64_t kNumels[] = {1, 64, 3, 5000, 63, 65, 129};
  for (const int segments : {1, 7, NormBatch<float>::kMaxSegments}) {
    for (const double p : kPs) {
      NormBatch<float> batch;
      NormSum sum(p);
      std::vector<at::Tensor> kept;
      for (int i = 0; i < segments; ++i) {
        kept.push_back(Make(Values::kNormal, kNumels[i % 7], at::kFloat));
        const int64_t first = 29 * i;
        sum.Add(kept.back(), first);
        batch.Add(
            {kept.back().const_data_ptr<float>(), kept.back().numel(), first});
      }
      EXPECT_EQ(batch.full(), segments == NormBatch<float>::kMaxSegments);
      for (const int64_t groups : {1, 2, 33, 10000}) {
        Words words = {};
        for (int64_t group = 0; group < groups; ++group) {
          AddBatch(batch, group, groups, p, &words);
        }
        ASSERT_EQ(TextOf(words, p), TextOf(sum)) << segments << " " << groups;
      }
    }
  }
}

// Against ExactSum: each magnitude alone, ties, and sums beyond double's range.
TEST(NormMathTest, RoundsAsExactSum) {
  std::mt19937_64 random(3);
  const auto same = [](const std::vector<double>& addends) {
    ExactSum sum;
    Words words = {};
    for (const double x : addends) {
      sum.Add(x);
      const SplitDouble split(x);
      for (int i = 0; i < 3; ++i) words[split.digit + i] += split.part[i];
    }
    CarryOnHost(words.data());
    EXPECT_EQ(HexFloat(RoundDigits(words.data())), HexFloat(sum.Round()));
  };
  same({});
  same({0});
  for (int exponent = 0; exponent < 2047; ++exponent) {
    const double power = BitCast<double>(static_cast<uint64_t>(exponent) << 52);
    const double odd = BitCast<double>(BitCast<uint64_t>(power) + 1);
    const double any =
        BitCast<double>(BitCast<uint64_t>(power) + (random() >> 12));
    for (const double x : {power, odd, any}) {
      for (const int below : {1, 30, 52, 53, 54, 63, 64, 65, 97, 500}) {
        const double small = std::ldexp(x, -below);
        same({x});
        same({x, small});
        same({x, std::ldexp(power, -53), small});
        same({x, x, small, std::ldexp(power, -1000)});
      }
    }
  }
  const double greatest = std::numeric_limits<double>::max();
  same({greatest, 0x1p969});
  same({greatest, 0x1p970});
  same({greatest, 0x1p969, 0x1p968, 0x1p-1074});
  same(std::vector<double>(1000, greatest));
}

TEST(NormMathTest, CarriesRipple) {
  Words words = {};
  for (int i = 0; i < 60; ++i) words[i] = 0xffffffff;
  words[0] += 1;
  CarryOnHost(words.data());
  for (int i = 0; i < 60; ++i) EXPECT_EQ(words[i], 0) << i;
  EXPECT_EQ(words[60], 1);
  words = {};
  words[3] = ~uint64_t{0};
  words[4] = ~uint64_t{0};
  CarryOnHost(words.data());
  EXPECT_EQ(words[3], 0xffffffff);
  EXPECT_EQ(words[4], 0xfffffffe);
  EXPECT_EQ(words[5], 0);
  EXPECT_EQ(words[6], 1);
}

// ---- of all ranks

// What StepShards does with the norm.
void ExpectStep(const double* scalars, double raw, const NormFinish& f) {
  const double inverse = 1 / f.divisor;
  const double norm = raw * inverse;
  EXPECT_EQ(HexFloat(scalars[kGradNorm]), HexFloat(OneNan(norm)));
  const bool skip = f.skip_on_overflow && !std::isfinite(raw);
  EXPECT_EQ(scalars[kSkip], skip ? 1 : 0);
  if (skip) {
    EXPECT_EQ(HexFloat(scalars[kClippedNorm]), "nan");
    return;
  }
  const double clip = ClipCoefficient(norm, f.max_norm);
  EXPECT_EQ(HexFloat(scalars[kClippedNorm]), HexFloat(OneNan(norm * clip)));
  EXPECT_EQ(HexFloat(scalars[kFactor]), HexFloat(OneNan(inverse * clip)));
}

std::vector<NormFinish> Finishes(double p, int64_t group_size) {
  std::vector<NormFinish> all;
  for (const double divisor : {1.0, 3.0, 65536.0, 1e-30}) {
    for (const double max_norm : {0.0, 1.0, 0.3, 1e9}) {
      for (const bool skip : {false, true}) {
        all.push_back({p, group_size, divisor, max_norm, skip});
      }
    }
  }
  return all;
}

struct Gathered {
  std::vector<uint64_t> all;
  double norm = 0;
};
// `replicas` groups of `group_size` ranks with the same values.
Gathered Gather(Values values, double p, int64_t group_size, int64_t replicas) {
  Gathered gathered;
  NormSum sum(p);
  for (int64_t rank = 0; rank < group_size; ++rank) {
    const at::Tensor x = Make(values, 1000 + rank, at::kFloat);
    Words words = {};
    Add(x, 0, p, &words);
    sum.Add(x, 0);
    gathered.all.insert(gathered.all.end(), words.begin(), words.end());
  }
  const std::vector<uint64_t> group = gathered.all;
  for (int64_t i = 1; i < replicas; ++i) {
    gathered.all.insert(gathered.all.end(), group.begin(), group.end());
  }
  gathered.norm = sum.Norm();
  return gathered;
}

TEST(NormMathTest, ScalarsAreThoseOfStepShards) {
  torch::manual_seed(4);
  for (const Values values : kAllValues) {
    for (const double p : kPs) {
      for (const int64_t ranks : {1, 2, 5}) {
        const Gathered g = Gather(values, p, ranks, 3);
        std::vector<NormFinish> finishes = Finishes(p, ranks);
        // Clipped because of the 1e-6.
        finishes.push_back({p, ranks, 3, g.norm * (1 / 3.0), false});
        for (const NormFinish& finish : finishes) {
          double scalars[kStepScalars];
          FinishNormOnHost(g.all.data(), 3 * ranks, finish, scalars);
          ExpectStep(scalars, g.norm, finish);
          EXPECT_EQ(scalars[kReplicasDiffer], 0);
        }
      }
    }
  }
}

TEST(NormMathTest, NothingWasAdded) {
  for (const double p : kPs) {
    const std::vector<uint64_t> all(2 * kNormWords);
    for (const NormFinish& finish : Finishes(p, 2)) {
      double scalars[kStepScalars];
      FinishNormOnHost(all.data(), 2, finish, scalars);
      ExpectStep(scalars, 0, finish);
    }
  }
}

// The smallest difference, in any word of any rank.
TEST(NormMathTest, FindsReplicasThatDiffer) {
  torch::manual_seed(5);
  const int64_t ranks = 2;
  const Gathered g = Gather(Values::kNormal, 2, ranks, 4);
  for (size_t i = 0; i < g.all.size(); ++i) {
    std::vector<uint64_t> all = g.all;
    all[i] ^= 1;
    double scalars[kStepScalars];
    FinishNormOnHost(all.data(), 4 * ranks, {.p = 2, .group_size = ranks},
                     scalars);
    const int64_t group = static_cast<int64_t>(i) / kNormWords / ranks;
    EXPECT_EQ(scalars[kReplicasDiffer],
              static_cast<double>(group == 0 ? ranks + 1 : group * ranks + 1))
        << i;
  }
}

// Replicas have the same sum, divided differently among a group's ranks.
TEST(NormMathTest, ReplicasAreComparedBySum) {
  std::vector<uint64_t> all(4 * kNormWords);
  all[30] = 0xffffffff;
  all[kNormWords + 30] = 2;
  all[2 * kNormWords + 31] = 1;
  all[3 * kNormWords + 30] = 1;
  double scalars[kStepScalars];
  FinishNormOnHost(all.data(), 4, {.p = 1, .group_size = 2}, scalars);
  EXPECT_EQ(scalars[kReplicasDiffer], 0);
}

}  // namespace
}  // namespace tessera
