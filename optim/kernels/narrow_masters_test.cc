// Masters of 16 bits: that they are the same however a range is cut and by
// whatever instructions, and are rounded without a bias. Masters of float32 in
// two halves: that they have the bits of whole ones.
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

// ---- remainders

// Float32 masters as a working copy and remainders.
struct SplitMasters {
  explicit SplitMasters(const at::Tensor& masters)
      : working(torch::empty(masters.sizes(), at::kBFloat16)),
        remainders(torch::empty(masters.sizes(), at::kShort)) {
    const auto* const bits =
        static_cast<const uint32_t*>(masters.const_data_ptr());
    for (int64_t i = 0; i < masters.numel(); ++i) {
      const bool nan = (bits[i] & 0x7fffffff) > 0x7f800000;
      const uint32_t word = nan ? 0x7fc00000 : bits[i];
      static_cast<uint16_t*>(working.mutable_data_ptr())[i] =
          static_cast<uint16_t>((word + 0x8000) >> 16);
      static_cast<uint16_t*>(remainders.mutable_data_ptr())[i] =
          static_cast<uint16_t>(word);
    }
  }
  bool operator==(const SplitMasters& other) const {
    return at::equal(working.view(at::kShort),
                     other.working.view(at::kShort)) &&
           at::equal(remainders, other.remainders);
  }
  at::Tensor working, remainders;
};

at::Tensor AnyMasters(int64_t numel) {
  torch::manual_seed(5);
  const at::Tensor bits = torch::randint(0, 1 << 16, {numel}, at::kInt);
  const at::Tensor masters = torch::empty({numel}, at::kFloat);
  auto* const to = static_cast<uint32_t*>(masters.mutable_data_ptr());
  for (int64_t i = 0; i < numel; ++i) {
    const auto lower = static_cast<uint32_t>(bits.const_data_ptr<int>()[i]);
    to[i] = static_cast<uint32_t>(i) << 16 | (i % 7 == 0 ? 0x8000 : lower);
  }
  return masters;
}

// A step without a change too: of SGD against zeros.
TEST(RemaindersTest, AStepHasTheBitsOfFloat32Masters) {
  constexpr int64_t kNumel = 1 << 16;
  for (const Formula formula : {Formula::kSgd, Formula::kAdamW}) {
    for (const bool zeros : {true, false}) {
      const at::Tensor gradient =
          zeros ? torch::zeros({kNumel}) : GradientOf(kNumel, 3);
      const auto k = CoefficientsOf(
          {.lr = 1e-2,
           .algorithm =
               formula == Formula::kSgd ? Algorithm::kSgd : Algorithm::kAdamW},
          1, 1, SeedOf(1, 1));
      const auto range_of = [&](const at::Tensor& master,
                                std::vector<at::Tensor>* states) {
        StepRange range;
        range.master = master.mutable_data_ptr();
        for (int s = 0; s < StatesOf(formula).count; ++s) {
          states->push_back(torch::zeros({kNumel}));
          range.states[s] = states->back().mutable_data_ptr();
        }
        states->push_back(torch::zeros({kNumel}));
        range.average = states->back().mutable_data_ptr();
        range.gradient = gradient.const_data_ptr();
        range.numel = kNumel;
        return range;
      };
      const at::Tensor masters = AnyMasters(kNumel);
      const SplitMasters before(masters);
      std::vector<at::Tensor> states;
      StepElements(formula, range_of(masters, &states), k);
      const SplitMasters expected(masters);
      EXPECT_EQ(zeros, expected == before);
      for (const Isa isa : Isas()) {
        for (const int64_t piece : {kNumel, int64_t{10'009}, int64_t{64}}) {
          SplitMasters split(AnyMasters(kNumel));
          std::vector<at::Tensor> split_states;
          StepRange range = range_of(split.remainders, &split_states);
          range.master_type = NumberType::kRemainder;
          range.working_type = NumberType::kBFloat16;
          range.working = split.working.mutable_data_ptr();
          for (int64_t begin = 0; begin < kNumel; begin += piece) {
            StepElements(formula,
                         Part(range, begin, std::min(begin + piece, kNumel)), k,
                         isa);
          }
          EXPECT_TRUE(split == expected) << IsaName(isa) << " " << piece;
          for (size_t s = 0; s < states.size(); ++s) {
            EXPECT_EQ(std::memcmp(states[s].const_data_ptr(),
                                  split_states[s].const_data_ptr(),
                                  static_cast<size_t>(kNumel) * 4),
                      0)
                << IsaName(isa) << " " << piece << " state " << s;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
