// Masters of 16 bits: that they are the same however a range is cut and by
// whatever instructions, and are rounded without a bias.
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

}  // namespace
}  // namespace tessera
