#include "optim/norm/grad_norm.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/status_matchers.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double Norm(const std::vector<at::Tensor>& tensors, double p) {
  NormSum sum(p);
  for (const at::Tensor& tensor : tensors) sum.Add(tensor, 0);
  return sum.Norm();
}
double Norm(const std::vector<double>& values, double p) {
  return Norm({torch::tensor(values, at::kDouble)}, p);
}

// A part of a parameter.
struct Segment {
  at::Tensor values;
  int64_t first;
};

// Cuts at random multiples of `grid` of the storage's elements.
void Cut(const Segment& whole, int64_t grid, std::mt19937_64* random,
         std::vector<Segment>* parts) {
  const int64_t numel = whole.values.numel();
  for (int64_t begin = 0, end; begin < numel; begin = end) {
    const int64_t blocks = 1 + static_cast<int64_t>((*random)() % 8);
    end = (whole.first + begin) / grid * grid + blocks * grid - whole.first;
    end = std::min(end, numel);
    parts->push_back(
        {whole.values.slice(0, begin, end).clone(), whole.first + begin});
  }
}

class AnyDtype
    : public ::testing::TestWithParam<std::tuple<at::ScalarType, double>> {};

TEST_P(AnyDtype, CutsOrderAndRanksDoNotMatter) {
  const auto [dtype, p] = GetParam();
  torch::manual_seed(1);
  std::mt19937_64 random(1);
  const int64_t grid = c10::isComplexType(dtype) ? 32 : 64;
  std::vector<Segment> parameters;
  NormSum whole(p);
  for (const int64_t numel : {1, 63, 64, 1000, 4097}) {
    const at::Tensor values =
        torch::randn({numel}, c10::isComplexType(dtype) ? at::kComplexDouble
                                                        : at::kDouble) *
        torch::exp(40 * torch::rand({numel}, at::kDouble) - 20);
    parameters.push_back({values.to(dtype), numel % 71});
    whole.Add(parameters.back().values, parameters.back().first);
  }
  for (int world_size = 1; world_size <= 9; ++world_size) {
    std::vector<Segment> parts;
    for (const Segment& parameter : parameters) {
      Cut(parameter, grid, &random, &parts);
    }
    std::shuffle(parts.begin(), parts.end(), random);
    std::vector<NormSum> ranks(world_size, NormSum(p));
    for (const Segment& part : parts) {
      ranks[random() % world_size].Add(part.values, part.first);
    }
    NormSum all(p);
    for (const NormSum& rank : ranks) {
      TESSERA_ASSERT_OK(all.Merge(rank.Serialize()));
    }
    ASSERT_EQ(all.Serialize(), whole.Serialize());
    ASSERT_EQ(HexFloat(all.Norm()), HexFloat(whole.Norm()));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, AnyDtype,
    ::testing::Combine(::testing::Values(at::kFloat, at::kDouble, at::kBFloat16,
                                         at::kComplexFloat, at::kComplexDouble),
                       ::testing::Values(1, 2, 3, 2.5, kInfinity)),
    [](const auto& info) {
      const double p = std::get<1>(info.param) * 10;
      return absl::StrCat(c10::toString(std::get<0>(info.param)), "P", p);
    });

TEST(NormSum, KnownValues) {
  EXPECT_EQ(Norm({3, -4}, 2), 5);
  EXPECT_EQ(Norm({3, -4}, 1), 7);
  EXPECT_EQ(Norm({3, -4, 5}, 3), 6);
  EXPECT_EQ(Norm({1, -16}, 0.5), 25);
  EXPECT_EQ(Norm({3, -4, 2}, kInfinity), 4);
  const at::Tensor x = torch::arange(-50000, 50001).to(at::kFloat);
  EXPECT_EQ(Norm({x}, 1), 2500050000.0);
  EXPECT_EQ(Norm({x, x}, 2), std::sqrt(166671666700000.0));
}

TEST(NormSum, RootsAreExact) {
  for (const double x : {1.0, 0x1p300, 0x1p-300}) {
    EXPECT_EQ(Norm({x, x, x}, 3), std::cbrt(3.0) * x) << x;
    EXPECT_EQ(Norm({x}, 3), x);
    EXPECT_EQ(Norm({x}, 2.5), x);
  }
}

TEST(NormSum, NothingAndZeros) {
  for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
    EXPECT_EQ(NormSum(p).Norm(), 0);
    EXPECT_EQ(Norm({torch::empty({0})}, p), 0);
    EXPECT_EQ(Norm({torch::empty({0}, at::kComplexFloat)}, p), 0);
    EXPECT_EQ(HexFloat(Norm({0.0, -0.0}, p)), "0x0p+0");
  }
}

TEST(NormSum, Subnormals) {
  const double tiny = std::numeric_limits<double>::denorm_min();
  EXPECT_EQ(Norm({tiny, -tiny, tiny}, 1), 3 * tiny);
  EXPECT_EQ(Norm({tiny, -3 * tiny}, kInfinity), 3 * tiny);
  EXPECT_EQ(Norm({tiny}, 2), 0) << "the square is below double's range";
  const float tiny_float = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(Norm({torch::full({4}, tiny_float)}, 2), 2.0 * tiny_float);
}

TEST(NormSum, GreatValues) {
  const float greatest = std::numeric_limits<float>::max();
  EXPECT_EQ(Norm({torch::full({4}, greatest)}, 2), 2.0 * greatest);
  EXPECT_EQ(Norm({1e200}, 2), kInfinity);
  EXPECT_EQ(Norm({1e200, 1e201}, kInfinity), 1e201);
}

TEST(NormSum, NotFinite) {
  const auto blocks = [](double a, double b) {
    at::Tensor x = torch::ones({128}, at::kDouble);
    x[3] = a;
    x[100] = b;
    return x;
  };
  for (const double p : {1.0, 2.0, 3.0, 2.5, kInfinity}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kComplexFloat}) {
      EXPECT_EQ(Norm({blocks(-kInfinity, 5).to(dtype)}, p), kInfinity);
      EXPECT_EQ(Norm({blocks(kInfinity, -kInfinity).to(dtype)}, p), kInfinity);
      for (const auto& x :
           {blocks(NAN, 1), blocks(kInfinity, NAN), blocks(-NAN, -kInfinity)}) {
        EXPECT_EQ(HexFloat(Norm({x.to(dtype)}, p)), "nan") << p;
      }
    }
    NormSum inf(p), nan(p);
    inf.Add(blocks(kInfinity, 1), 0);
    nan.Add(blocks(NAN, 1), 0);
    TESSERA_ASSERT_OK(inf.Merge(nan.Serialize()));
    EXPECT_EQ(HexFloat(inf.Norm()), "nan");
    TESSERA_ASSERT_OK(nan.Merge(inf.Serialize()));
    EXPECT_EQ(HexFloat(nan.Norm()), "nan");
  }
}

TEST(NormSum, ComplexNumbersAndPairsOfRealOnes) {
  torch::manual_seed(1);
  for (const at::ScalarType dtype : {at::kComplexFloat, at::kComplexDouble}) {
    const at::Tensor x = torch::randn({500}, dtype);
    NormSum complex(2), pairs(2);
    complex.Add(x, 7);
    pairs.Add(torch::view_as_real(x).flatten(), 14);
    EXPECT_EQ(complex.Serialize(), pairs.Serialize());
  }
  const at::Tensor x = torch::complex(torch::tensor({3., 0.}, at::kDouble),
                                      torch::tensor({4., -2.}, at::kDouble));
  EXPECT_EQ(Norm({x}, 1), 7);
  EXPECT_EQ(Norm({x}, kInfinity), 5);
  EXPECT_EQ(Norm({x}, 2), std::sqrt(29));
}

// More than the chunk that is held as block sums at once.
TEST(NormSum, LongSegments) {
  torch::manual_seed(1);
  const at::Tensor x =
      torch::randint(-999, 1000, {(1 << 22) + 12345}, at::kFloat);
  NormSum sum(2);
  sum.Add(x, 100);
  // Whole numbers below 2^53 are added without rounding in any order.
  const int64_t squares = x.to(at::kLong).square().sum().item<int64_t>();
  EXPECT_EQ(sum.Norm(), std::sqrt(static_cast<double>(squares)));
}
// Where the chunks end does not depend on where the segment starts.
TEST(NormSum, ChunksAreOnTheGrid) {
  torch::manual_seed(1);
  const at::Tensor x = torch::randn({(1 << 22) + 12345});
  const int64_t cut = (int64_t{1} << 21) - 100;
  NormSum whole(2), parts(2);
  whole.Add(x, 100);
  parts.Add(x.slice(0, 0, cut), 100);
  parts.Add(x.slice(0, cut), 100 + cut);
  EXPECT_EQ(whole.Serialize(), parts.Serialize());
}

TEST(NormSum, RefusesDamagedText) {
  NormSum sum(2);
  sum.Add(torch::tensor({1.5f, 2.f}), 0);
  const std::string good = sum.Serialize();
  const auto refused = [&](const std::string& text) {
    EXPECT_THAT(sum.Merge(text),
                StatusIs(absl::StatusCode::kDataLoss,
                         AllOf(HasSubstr("gradient norm"),
                               HasSubstr(absl::StrCat("got '", text, "'")))));
    ASSERT_EQ(sum.Serialize(), good) << text;
  };
  for (const char* text : {"", " ", "x", "   ", "a b c d"}) refused(text);
  for (size_t i = 0; i < good.size(); ++i) {
    refused(good.substr(0, i));
    refused(good.substr(i + 1));
    for (const char c : {' ', '0', '7', 'f', '-', '\0'}) {
      if (good[i] == c) continue;
      std::string text = good;
      text[i] = c;
      refused(text);
    }
  }
  refused(absl::StrCat(good, " "));
}

// Texts that another program could give, with a right fingerprint.
TEST(NormSum, RefusesForeignFields) {
  for (const char* fields :
       {"0x1p+1 -0x1p+0 0 ", "0x1p+1 x 0 ", "0x1p+1 0x0p+0 00 "}) {
    const std::string text = absl::StrCat(
        fields, absl::Hex(Fingerprint(fields, std::string(fields).size()),
                          absl::kZeroPad16));
    EXPECT_THAT(NormSum(2).Merge(text), StatusIs(absl::StatusCode::kDataLoss));
  }
}

TEST(NormSum, RefusesAnotherP) {
  EXPECT_THAT(NormSum(2).Merge(NormSum(3).Serialize()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("p = 2"), HasSubstr("0x1.8p+1"))));
}

TEST(ClipCoefficient, IsOneUpToTheMaximum) {
  EXPECT_EQ(ClipCoefficient(0, 1), 1);
  EXPECT_EQ(ClipCoefficient(0.5, 1), 1);
  EXPECT_EQ(ClipCoefficient(1 - 2e-6, 1), 1);
  EXPECT_EQ(ClipCoefficient(1, 1), 1 / (1 + 1e-6));
  EXPECT_EQ(ClipCoefficient(4, 1), 1 / (4 + 1e-6));
  EXPECT_EQ(ClipCoefficient(4, 0.25), 0.25 / (4 + 1e-6));
}

TEST(ClipCoefficient, NoClipping) {
  EXPECT_EQ(ClipCoefficient(1e9, 0), 1);
  EXPECT_EQ(ClipCoefficient(1e9, -1), 1);
  EXPECT_EQ(ClipCoefficient(1e9, kInfinity), 1);
}

TEST(ClipCoefficient, NotFinite) {
  EXPECT_EQ(ClipCoefficient(kInfinity, 1), 0);
  EXPECT_EQ(ClipCoefficient(NAN, 1), 1);
}

}  // namespace
}  // namespace tessera
