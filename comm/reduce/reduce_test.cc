// Every instruction set gives the bits of the portable loops, and those the
// values of plain arithmetic.
#include "comm/reduce/reduce.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

template <typename T>
std::vector<T> Reduce(ElementType type, ReduceOp op,
                      const std::vector<std::vector<T>>& values, Isa isa) {
  std::vector<T> out(values[0].size());
  std::vector<const void*> sources;
  for (const auto& v : values) sources.push_back(v.data());
  ReduceInOrder(type, op, out.data(), sources.data(),
                static_cast<int>(sources.size()),
                static_cast<int64_t>(out.size()), isa);
  return out;
}

std::vector<Isa> Isas() {
  std::vector<Isa> isas = {Isa::kPortable};
  if (BestIsa() >= Isa::kAvx2) isas.push_back(Isa::kAvx2);
  if (BestIsa() >= Isa::kAvx512) isas.push_back(Isa::kAvx512);
  return isas;
}

// Every 16-bit pattern as it is, and against every exponent.
TEST(ReduceTest, SixteenBitTypesHaveTheSameBitsEverywhere) {
  std::vector<uint16_t> all(1 << 16), others(1 << 16), third(1 << 16);
  for (int i = 0; i < 1 << 16; ++i) {
    all[i] = static_cast<uint16_t>(i);
    others[i] = static_cast<uint16_t>(i * 40503u >> 3);
    third[i] = static_cast<uint16_t>(i * 30011u >> 5);
  }
  for (ElementType type : {ElementType::kFloat16, ElementType::kBFloat16}) {
    for (int o = 0; o < kNumReduceOps; ++o) {
      const auto op = static_cast<ReduceOp>(o);
      for (const auto& values : std::vector<std::vector<std::vector<uint16_t>>>{
               {all}, {all, others}, {all, others, third}}) {
        const auto expected = Reduce(type, op, values, Isa::kPortable);
        for (Isa isa : Isas()) {
          EXPECT_TRUE(Reduce(type, op, values, isa) == expected)
              << ElementTypeName(type) << " " << static_cast<int>(op) << " "
              << IsaName(isa);
        }
      }
    }
  }
}

// Cut after any source, over every 16-bit pattern.
TEST(ReduceTest, PartialSumsOfSixteenBitsGiveTheBitsOfTheWhole) {
  constexpr int kSources = 4;
  std::vector<std::vector<uint16_t>> values(kSources);
  std::vector<const void*> sources;
  for (int s = 0; s < kSources; ++s) {
    for (int i = 0; i < 1 << 16; ++i) {
      values[s].push_back(static_cast<uint16_t>(i * (s * 30010u + 1) >> s));
    }
    sources.push_back(values[s].data());
  }
  std::vector<float> partial(1 << 16);
  std::vector<uint16_t> sum(1 << 16);
  for (ElementType type : {ElementType::kFloat16, ElementType::kBFloat16}) {
    const auto whole = Reduce(type, ReduceOp::kSum, values, Isa::kPortable);
    for (Isa isa : Isas()) {
      for (int cut = 1; cut < kSources; ++cut) {
        PartialSumInOrder(type, nullptr, sources.data(), cut, /*last=*/false,
                          partial.data(), 1 << 16, isa);
        PartialSumInOrder(type, partial.data(), sources.data() + cut,
                          kSources - cut,
                          /*last=*/true, sum.data(), 1 << 16, isa);
        EXPECT_TRUE(sum == whole)
            << ElementTypeName(type) << " " << IsaName(isa) << " " << cut;
      }
    }
  }
}

float ToFloat(ElementType type, uint16_t bits) {
  if (type == ElementType::kBFloat16) {
    const uint32_t word = uint32_t{bits} << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
  }
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  const float sign = bits & 0x8000 ? -1.f : 1.f;
  if (exponent == 31) {
    return mantissa ? std::nanf("")
                    : sign * std::numeric_limits<float>::infinity();
  }
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                               : std::ldexp(static_cast<float>(1024 + mantissa),
                                            exponent - 25));
}

// The sum of two is the representable value nearest to the exact sum, the even
// one if two are as near.
TEST(ReduceTest, SixteenBitSumsAreRoundedOnceToNearestEven) {
  for (ElementType type : {ElementType::kFloat16, ElementType::kBFloat16}) {
    const uint16_t infinity = type == ElementType::kFloat16 ? 0x7c00 : 0x7f80;
    std::vector<uint16_t> a, b;
    for (uint32_t i = 0; i < 20'000; ++i) {
      a.push_back(static_cast<uint16_t>(i * 2654435761u >> 16));
      b.push_back(static_cast<uint16_t>(i * 2246822519u >> 15));
    }
    const auto sums =
        Reduce<uint16_t>(type, ReduceOp::kSum, {a, b}, Isa::kPortable);
    for (size_t i = 0; i < a.size(); ++i) {
      const float exact = ToFloat(type, a[i]) + ToFloat(type, b[i]);
      const uint16_t magnitude = sums[i] & 0x7fff;
      if (std::isnan(exact)) {
        EXPECT_GT(magnitude, infinity);
        continue;
      }
      if (magnitude == infinity || magnitude == 0) continue;
      const double error =
          std::fabs(double{ToFloat(type, sums[i])} - double{exact});
      for (int step : {-1, 1}) {
        const auto next = static_cast<uint16_t>(sums[i] + step);
        if ((next & 0x7fff) == infinity) continue;
        const double other =
            std::fabs(double{ToFloat(type, next)} - double{exact});
        EXPECT_TRUE(error < other || (error == other && (sums[i] & 1) == 0))
            << ElementTypeName(type) << " " << a[i] << " + " << b[i];
      }
    }
  }
}

TEST(ReduceTest, FloatsFoldFromLeftToRight) {
  // Any other order gives another sum.
  const std::vector<std::vector<float>> values = {
      {1e8f, 1.f}, {1.f, 1e8f}, {-1e8f, -1e8f}, {1.f, 3.f}};
  for (Isa isa : Isas()) {
    EXPECT_EQ(Reduce(ElementType::kFloat32, ReduceOp::kSum, values, isa),
              (std::vector<float>{((1e8f + 1.f) - 1e8f) + 1.f,
                                  ((1.f + 1e8f) - 1e8f) + 3.f}));
    EXPECT_EQ(Reduce(ElementType::kFloat32, ReduceOp::kAverage, values, isa),
              (std::vector<float>{0.25f, 0.75f}));
  }
}

TEST(ReduceTest, IntegersWrapAndBoolsAreLogical) {
  for (Isa isa : Isas()) {
    EXPECT_EQ((Reduce<int8_t>(ElementType::kInt8, ReduceOp::kSum,
                              {{127, -128}, {1, -1}}, isa)),
              (std::vector<int8_t>{-128, 127}));
    EXPECT_EQ((Reduce<int16_t>(ElementType::kInt16, ReduceOp::kSum,
                               {{-32768, 30000}, {-1, 30000}}, isa)),
              (std::vector<int16_t>{32767, -5536}));
    EXPECT_EQ((Reduce<int64_t>(ElementType::kInt64, ReduceOp::kAverage,
                               {{-7, 8}, {0, 0}, {0, 0}}, isa)),
              (std::vector<int64_t>{-2, 2}));
    const std::vector<std::vector<uint8_t>> bools = {{0, 0, 1, 2},
                                                     {0, 1, 1, 0}};
    EXPECT_EQ(Reduce(ElementType::kBool, ReduceOp::kSum, bools, isa),
              (std::vector<uint8_t>{0, 1, 1, 1}));
  }
}

// Large sums are written past the caches, from the first full line on.
TEST(ReduceTest, LargeSumsAreRightAtEveryOffset) {
  constexpr int64_t kNumel = (1 << 18) + 21;
  std::vector<float> many(kNumel + 18);
  for (size_t i = 0; i < many.size(); ++i) {
    many[i] = 0.1f * static_cast<float>(i);
  }
  const float* const a = many.data();  // on a line's boundary or not
  const float* const b = a + 17;
  const void* sources[] = {a, b};
  for (Isa isa : Isas()) {
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
      for (int64_t offset = 0; offset < 17; ++offset) {
        std::vector<float> out(kNumel + 34, -7.f);
        ReduceInOrder(ElementType::kFloat32, op, out.data() + offset, sources,
                      2, kNumel, isa);
        int64_t wrong = 0;
        for (int64_t i = -offset; i < kNumel + 34 - offset; ++i) {
          const float sum = i < 0 || i >= kNumel   ? -7.f
                            : op == ReduceOp::kSum ? a[i] + b[i]
                                                   : (a[i] + b[i]) / 2;
          wrong += out[i + offset] != sum;
        }
        EXPECT_EQ(wrong, 0)
            << IsaName(isa) << " " << static_cast<int>(op) << " +" << offset;
      }
    }
  }
}

TEST(ReduceTest, OutMayBeASource) {
  for (Isa isa : Isas()) {
    for (int own : {0, 1, 2}) {
      std::vector<std::vector<float>> values(3, std::vector<float>(5000));
      for (int s = 0; s < 3; ++s) {
        for (int i = 0; i < 5000; ++i) values[s][i] = 0.1f * i + s / 3.f;
      }
      const auto expected =
          Reduce(ElementType::kFloat32, ReduceOp::kSum, values, isa);
      const void* sources[] = {values[0].data(), values[1].data(),
                               values[2].data()};
      ReduceInOrder(ElementType::kFloat32, ReduceOp::kSum, values[own].data(),
                    sources, 3, 5000, isa);
      EXPECT_TRUE(values[own] == expected);
    }
  }
}

}  // namespace
}  // namespace tessera
