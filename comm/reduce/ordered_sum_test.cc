#include "comm/reduce/ordered_sum.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace tessera {
namespace {

// Returns values of mixed magnitude, so that the order of a sum shows in its
// bits.
template <typename T>
std::vector<T> Values(int64_t numel) {
  std::mt19937_64 random(numel);
  std::vector<T> values(numel);
  for (T& value : values) {
    const int64_t mantissa = static_cast<int64_t>(random() % 20001) - 10000;
    value = static_cast<T>(mantissa) *
            static_cast<T>(std::pow(10.0, static_cast<int>(random() % 9) - 4));
  }
  return values;
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() ||
          std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <typename T>
class OrderedSumTest : public testing::Test {};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(OrderedSumTest, Types);

TYPED_TEST(OrderedSumTest, CpuAddsInOrder) {
  for (int slices : {1, 2, 3, 8}) {
    for (int64_t numel : {0, 1, 7, 1000}) {
      const auto values = Values<TypeParam>(slices * numel);
      std::vector<TypeParam> out(numel);
      OrderedSumCpu(values.data(), slices, numel, /*divisor=*/1, out.data());
      std::vector<TypeParam> want(values.begin(), values.begin() + numel);
      for (int s = 1; s < slices; ++s) {
        for (int64_t i = 0; i < numel; ++i) want[i] += values[s * numel + i];
      }
      EXPECT_TRUE(SameBits(out, want)) << slices << " " << numel;
    }
  }
}

TYPED_TEST(OrderedSumTest, NegativeZeroStays) {
  const TypeParam zeros[2] = {TypeParam{-0.0}, TypeParam{-0.0}};
  TypeParam sum = 1;
  OrderedSumCpu(zeros, 2, 1, /*divisor=*/1, &sum);
  EXPECT_TRUE(std::signbit(sum));
}

TYPED_TEST(OrderedSumTest, OrderShows) {
  const auto values = Values<TypeParam>(3000);
  std::vector<TypeParam> turned(values.begin() + 1000, values.end());
  turned.insert(turned.end(), values.begin(), values.begin() + 1000);
  std::vector<TypeParam> a(1000);
  std::vector<TypeParam> b(1000);
  OrderedSumCpu(values.data(), 3, 1000, /*divisor=*/1, a.data());
  OrderedSumCpu(turned.data(), 3, 1000, /*divisor=*/1, b.data());
  EXPECT_FALSE(SameBits(a, b));
}

// 256 + 1 is 256 in bfloat16, so a sum that is rounded each time stays there.
TEST(OrderedSumOfHalvesTest, IsRoundedOnce) {
  const c10::BFloat16 values[3] = {256, 1, 1};
  c10::BFloat16 sum = 0;
  OrderedSumCpu(values, 3, 1, /*divisor=*/1, &sum);
  EXPECT_EQ(258, static_cast<float>(sum));
}

// 257 is rounded to 256 first.
TEST(OrderedSumOfHalvesTest, IsDividedAfterItIsRounded) {
  const c10::BFloat16 values[2] = {256, 1};
  c10::BFloat16 sum = 0;
  OrderedSumCpu(values, 2, 1, /*divisor=*/3, &sum);
  EXPECT_EQ(static_cast<float>(c10::BFloat16(256.f / 3)),
            static_cast<float>(sum));
  const float floats[2] = {1, 2};
  float third = 0;
  OrderedSumCpu(floats, 2, 1, /*divisor=*/7, &third);
  EXPECT_EQ(3.f / 7, third);
}

}  // namespace
}  // namespace tessera
