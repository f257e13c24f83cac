#include "optim/norm/block_powers.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace tessera {
namespace {

std::vector<double> ByOperators(const at::Tensor& x, int64_t first, double p) {
  const at::Tensor blocks = BlockPowersByOperators(x, first, p).contiguous();
  const double* const data = blocks.const_data_ptr<double>();
  return std::vector<double>(data, data + blocks.numel());
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The header's words, element by element, for p = 1, 2, 3 and infinity.
std::vector<double> Expected(const at::Tensor& segment, int64_t first,
                             double p) {
  const at::Tensor x = segment.to(at::kDouble).abs();
  const int64_t numel = x.numel();
  std::vector<double> sums;
  for (int64_t begin = first / 64 * 64; begin < first + numel; begin += 64) {
    double lane[8] = {};
    for (int64_t i = begin; i < begin + 64; ++i) {
      if (i < first || i >= first + numel) continue;
      const double value = x[i - first].item<double>();
      double power = value;
      if (std::isinf(p)) {
        lane[i % 8] = std::max(lane[i % 8], power);
        continue;
      }
      for (int k = 1; k < p; ++k) power *= value;
      lane[i % 8] += power;
    }
    sums.push_back(std::isinf(p)
                       ? *std::max_element(lane, lane + 8)
                       : ((lane[0] + lane[1]) + (lane[2] + lane[3])) +
                             ((lane[4] + lane[5]) + (lane[6] + lane[7])));
  }
  return sums;
}

// Returns values of all magnitudes whose squares the dtype can hold.
at::Tensor Values(int64_t numel, at::ScalarType dtype) {
  const double spread = dtype == at::kHalf ? 5 : 30;
  return (torch::randn({numel}, at::kDouble) *
          torch::exp(spread * torch::rand({numel}, at::kDouble) - spread / 2))
      .to(dtype);
}

class RealBlockPowers : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override { torch::manual_seed(1); }
};

TEST_P(RealBlockPowers, AreThoseOfTheDefinition) {
  for (const double p : {1.0, 2.0, 3.0, 7.0, kInfinity}) {
    for (const int64_t first : {0, 1, 7, 8, 63, 64, 100}) {
      for (const int64_t numel : {1, 5, 63, 64, 65, 200}) {
        const at::Tensor x = Values(numel, GetParam());
        const std::vector<double> expected = Expected(x, first, p);
        ASSERT_EQ(BlockPowers(x, first, p), expected)
            << "p " << p << ", first " << first << ", numel " << numel;
        ASSERT_EQ(ByOperators(x, first, p), expected)
            << "p " << p << ", first " << first << ", numel " << numel;
      }
    }
  }
}

TEST_P(RealBlockPowers, AnyPowerIsPow) {
  const at::Tensor x = Values(300, GetParam());
  for (const double p : {0.5, 2.5, 17.0}) {
    const std::vector<double> sums = BlockPowers(x, 3, p);
    const std::vector<double> same = ByOperators(x, 3, p);
    ASSERT_EQ(sums.size(), 5u);
    for (int64_t b = 0; b < 5; ++b) {
      const double expected = x.to(at::kDouble)
                                  .slice(0, b * 64 - (b > 0 ? 3 : 0),
                                         std::min<int64_t>(b * 64 + 61, 300))
                                  .abs()
                                  .pow(p)
                                  .sum()
                                  .item<double>();
      // 64 powers and 64 additions, each with a relative error below 2^-52.
      EXPECT_NEAR(sums[b], expected, expected * 128 * 0x1p-52) << p;
      EXPECT_NEAR(same[b], expected, expected * 128 * 0x1p-52) << p;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, RealBlockPowers,
                         ::testing::Values(at::kFloat, at::kDouble, at::kHalf,
                                           at::kBFloat16),
                         [](const auto& info) {
                           return std::string(c10::toString(info.param));
                         });

TEST(BlockPowers, ThreadsDoNotMatter) {
  const at::Tensor x = Values(1 << 20, at::kFloat);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const std::vector<double> expected = BlockPowers(x, 5, 2);
  at::set_num_threads(3);
  EXPECT_EQ(BlockPowers(x, 5, 2), expected);
  at::set_num_threads(threads);
}

TEST(BlockPowers, ComplexNumbersCountAsTwoElements) {
  for (const at::ScalarType dtype : {at::kComplexFloat, at::kComplexDouble}) {
    // 3 + 4i and so on: moduli without rounding.
    const at::Tensor modulus = torch::arange(1, 101, at::kDouble);
    const at::Tensor x = torch::complex(modulus * 3, modulus * -4).to(dtype);
    for (const double p : {1.0, 3.0, kInfinity}) {
      const at::Tensor all = (modulus * 5).pow(std::isinf(p) ? 1 : p);
      for (const std::vector<double>& sums :
           {BlockPowers(x, 30, p), ByOperators(x, 30, p)}) {
        ASSERT_EQ(sums.size(), 5u);
        for (int64_t b = 0; b < 5; ++b) {
          const at::Tensor block =
              all.slice(0, std::max<int64_t>(b * 32 - 30, 0),
                        std::min<int64_t>(b * 32 + 2, 100));
          EXPECT_EQ(sums[b],
                    (std::isinf(p) ? block.max() : block.sum()).item<double>());
        }
      }
    }
  }
}

TEST(BlockPowers, NotFinite) {
  for (const double p : {1.0, 2.0, 3.0, 2.5, kInfinity}) {
    at::Tensor x = torch::ones({256});
    x[70] = -kInfinity;
    x[130] = NAN;
    x[131] = kInfinity;
    x[200] = NAN;
    for (const std::vector<double>& sums :
         {BlockPowers(x, 0, p), ByOperators(x, 0, p)}) {
      EXPECT_EQ(sums[0], std::isinf(p) ? 1 : 64);
      EXPECT_EQ(sums[1], kInfinity);
      EXPECT_TRUE(std::isnan(sums[2])) << p;
      EXPECT_TRUE(std::isnan(sums[3])) << p;
    }
  }
}

TEST(BlockPowers, OtherDtypesThrow) {
  EXPECT_THROW(BlockPowers(torch::ones({3}, at::kLong), 0, 2), c10::Error);
}

}  // namespace
}  // namespace tessera
