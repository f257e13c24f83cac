#include "optim/matrix/newton_schulz.h"

#include <torch/torch.h>

#include <tuple>

#include "gtest/gtest.h"

namespace tessera {
namespace {

// The header's iteration on singular values: X = U S V^T stays of these U and
// V.
at::Tensor SingularValues(const at::Tensor& matrix, int64_t steps) {
  at::Tensor s = std::get<1>(torch::svd(matrix)) / matrix.norm();
  for (int64_t i = 0; i < steps; ++i) {
    s = 3.4445 * s - 4.7750 * s.pow(3) + 2.0315 * s.pow(5);
  }
  return s;
}

at::Tensor Exact(const at::Tensor& matrix, int64_t steps) {
  const auto [u, s, v] = torch::svd(matrix);
  return u.matmul(torch::diag(SingularValues(matrix, steps))).matmul(v.t());
}

const std::pair<int64_t, int64_t> kSizes[] = {
    {1, 1}, {1, 7}, {7, 1}, {16, 16}, {17, 40}, {40, 17}, {64, 129}};

TEST(NewtonSchulzTest, IsTheIterationOfSingularValues) {
  for (const bool gram : {false, true}) {
    for (const int64_t steps : {1, 2, 3, 5, 7}) {
      for (const auto& [rows, columns] : kSizes) {
        torch::manual_seed(1);
        const at::Tensor x = torch::randn({rows, columns}, at::kDouble);
        const at::Tensor expected = Exact(x, steps);
        const at::Tensor y = Orthogonal(x, {steps, gram, at::kDouble});
        // Rounding errors of float64, which a step may triple.
        const double bound = 0x1p-53 * 64 * std::pow(4.0, steps);
        EXPECT_LT((y - expected).abs().max().item<double>(), bound)
            << gram << " " << steps << " " << rows << " x " << columns;
      }
    }
  }
}

// What is below: each product and sum of a step is rounded to the dtype, to
// which the iteration is stable: singular values end between 0.6 and 1.3.
TEST(NewtonSchulzTest, InFewBitsItIsNearlyOrthogonal) {
  for (const auto& [gram, dtype] :
       {std::pair(false, at::kBFloat16), std::pair(true, at::kHalf),
        std::pair(false, at::kFloat), std::pair(true, at::kFloat)}) {
    for (const auto& [rows, columns] : kSizes) {
      torch::manual_seed(2);
      const at::Tensor x = torch::randn({rows, columns});
      const at::Tensor y = Orthogonal(x, {5, gram, dtype});
      ASSERT_EQ(y.scalar_type(), at::kFloat);
      ASSERT_EQ(y.sizes(), x.sizes());
      const at::Tensor s = std::get<1>(torch::svd(y.to(at::kDouble)));
      const at::Tensor wanted = SingularValues(x.to(at::kDouble), 5);
      // A singular value near 0 stays below what the others come to.
      EXPECT_LT(s.max().item<double>(), 1.3) << rows << " x " << columns;
      EXPECT_GT(s.min().item<double>(), wanted.min().item<double>() - 0.15)
          << rows << " x " << columns << " " << gram;
    }
  }
}

TEST(NewtonSchulzTest, ZerosStayZeros) {
  for (const bool gram : {false, true}) {
    EXPECT_TRUE(Orthogonal(torch::zeros({3, 5}), {5, gram, at::kFloat})
                    .equal(torch::zeros({3, 5})));
  }
}

TEST(NewtonSchulzTest, DoesNotDependOnTheNumberOfThreads) {
  const int threads = at::get_num_threads();
  for (const auto& [gram, dtype] :
       {std::pair(false, at::kBFloat16), std::pair(true, at::kHalf),
        std::pair(false, at::kFloat)}) {
    // Products of 16 bits are slow where the processor has none.
    const int less = dtype == at::kFloat ? 1 : 2;
    for (const auto& [rows, columns] :
         {std::pair(256 / less, 768 / less), std::pair(768 / less, 256 / less),
          std::pair(511 / less, 513 / less)}) {
      torch::manual_seed(3);
      const at::Tensor x = torch::randn({rows, columns});
      at::set_num_threads(1);
      const at::Tensor one = Orthogonal(x, {5, gram, dtype});
      at::set_num_threads(2);
      EXPECT_TRUE(Orthogonal(x, {5, gram, dtype}).equal(one))
          << rows << " x " << columns << " " << c10::toString(dtype);
    }
  }
  at::set_num_threads(threads);
}

}  // namespace
}  // namespace tessera
