#include "optim/factored/line_sums.h"

#include <torch/torch.h>

#include <cmath>

#include "gtest/gtest.h"

namespace tessera {
namespace {

// Rows of [R, C] whose columns are cut between ranks at these places.
at::Tensor CutSums(const at::Tensor& numbers,
                   const std::vector<int64_t>& cuts) {
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  for (const int64_t end : cuts) {
    parts.push_back(numbers.slice(1, begin, end));
    begin = end;
  }
  parts.push_back(numbers.slice(1, begin, numbers.size(1)));
  at::Tensor powers = torch::zeros({numbers.size(0), 1}, at::kDouble);
  for (const at::Tensor& part : parts) {
    powers.add_(BinPowers(part.amax(1, true)));
  }
  const LineCuts cut(
      powers, torch::full_like(powers, DigitsOf(numbers.size(1)), at::kLong));
  at::Tensor high = torch::zeros_like(powers), low = torch::zeros_like(powers);
  for (const at::Tensor& part : parts) {
    AddHalves(part, 1, cut.to_high, cut.to_low, high, low);
  }
  return cut.Sums(high, low);
}

at::Tensor Numbers() {
  torch::manual_seed(1);
  return torch::randn({61, 1024}, at::kDouble).square() *
         torch::logspace(-80, 80, 61, 2, at::kDouble).unsqueeze(1) *
         torch::logspace(-30, 0, 1024, 2, at::kDouble);
}

TEST(LineSumsTest, DoNotDependOnCutsOrOrder) {
  const at::Tensor numbers = Numbers();
  const at::Tensor whole = WholeLineSums(numbers, 1);
  for (const std::vector<int64_t>& cuts :
       {std::vector<int64_t>{}, {1}, {512}, {64, 65, 700}, {1000, 1023}}) {
    EXPECT_TRUE(at::equal(CutSums(numbers, cuts), whole));
  }
  EXPECT_TRUE(at::equal(WholeLineSums(numbers.flip(1), 1), whole));
}

// n numbers are cut off, each by less than 2^(16 - 2 L) of the largest; and the
// sum is rounded to float64 once, as is what it is compared with.
TEST(LineSumsTest, AreAllButExact) {
  const at::Tensor numbers = Numbers();
  const at::Tensor sums = WholeLineSums(numbers, 1);
  const double bound = std::ldexp(1024, 16 - 2 * 43) + 0x1p-52;
  for (int64_t r = 0; r < numbers.size(0); ++r) {
    long double exact = 0;
    for (int64_t c = 0; c < numbers.size(1); ++c) {
      exact += numbers.const_data_ptr<double>()[r * numbers.size(1) + c];
    }
    const auto sum = static_cast<long double>(sums[r].item<double>());
    EXPECT_LE(std::abs(static_cast<double>((sum - exact) / exact)), bound);
  }
}

TEST(LineSumsTest, OfOneNumberIsIt) {
  const std::vector<double> values = {
      0,         1, 0x1p-298, 0x1.fffffep127 * 0x1p127, 0x1.123456789abcdp300,
      0x1.fp-500};
  const at::Tensor numbers = torch::tensor(values, at::kDouble);
  EXPECT_TRUE(
      at::equal(WholeLineSums(numbers.unsqueeze(1), 1).squeeze(1), numbers));
}

TEST(LineSumsTest, OfWhatIsNotFinite) {
  const double inf = HUGE_VAL, nan = std::nan("");
  at::Tensor numbers = torch::ones({4, 300}, at::kDouble);
  numbers[0][299] = inf;
  numbers[1][3] = 0x1p576;
  numbers[2][3] = inf;
  numbers[2][299] = nan;
  for (const at::Tensor& sums :
       {WholeLineSums(numbers, 1), CutSums(numbers, {64, 128})}) {
    EXPECT_EQ(sums[0].item<double>(), inf);
    EXPECT_EQ(sums[1].item<double>(), inf);
    EXPECT_TRUE(std::isnan(sums[2].item<double>()));
    EXPECT_EQ(sums[3].item<double>(), 300);
  }
}

}  // namespace
}  // namespace tessera
