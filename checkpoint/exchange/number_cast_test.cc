#include "checkpoint/exchange/number_cast.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace tessera {
namespace {

// Halfway between two, and a hair beyond, which float32 does not have.
TEST(NumberCastTest, DoublesAreRoundedOnce) {
  const std::vector<std::pair<double, uint16_t>> cases = {
      {1.0 + 0x1p-8, 0x3f80},
      {1.0 + 0x1p-8 + 0x1p-40, 0x3f81},
      {1.0 + 0x1p-8 - 0x1p-40, 0x3f80},
      {-1.0 - 0x1p-8 - 0x1p-40, 0xbf81},
      {1.0 + 3 * 0x1p-8 - 0x1p-40, 0x3f81},
      {1e300, 0x7f80},
      {-1e-300, 0x8000},
      {0x1p-134, 0x0000},
      {0x1p-134 + 0x1p-180, 0x0001},
      {std::nan(""), 0x7fc0},
  };
  std::string in, out;
  std::vector<uint16_t> expected, got(cases.size());
  for (const auto& [from, to] : cases) {
    in.append(reinterpret_cast<const char*>(&from), sizeof(from));
    expected.push_back(to);
  }
  const auto n = static_cast<int64_t>(cases.size());
  NumberCast("F64", "BF16").Append(in.data(), n, 1, &out);
  std::memcpy(got.data(), out.data(), out.size());
  EXPECT_EQ(got, expected);
}

TEST(NumberCastTest, EveryPairOfDtypesEverySecondNumber) {
  // The numbers are 1.5, something else, and -2.
  const std::pair<const char*, std::string> froms[] = {
      {"F32", std::string("\0\0\xC0\x3F____\0\0\0\xC0", 12)},
      {"BF16", std::string("\xC0\x3F__\0\xC0", 6)},
      {"F16", std::string("\0\x3E__\0\xC0", 6)},
      {"F64", std::string("\0\0\0\0\0\0\xF8\x3F________"
                          "\0\0\0\0\0\0\0\xC0",
                          24)},
  };
  for (const auto& [from, bytes] : froms) {
    std::string wide, half, same, step;
    NumberCast(from, "F32").Append(bytes.data(), 2, 2, &wide);
    EXPECT_EQ(wide, std::string("\0\0\xC0\x3F\0\0\0\xC0", 8)) << from;
    NumberCast(from, "BF16").Append(bytes.data(), 2, 2, &half);
    EXPECT_EQ(half, std::string("\xC0\x3F\0\xC0", 4)) << from;
    const NumberCast none(from, from);
    none.Append(bytes.data(), 3, 1, &same);
    EXPECT_EQ(same, bytes);
    none.Append(bytes.data(), 2, 2, &step);
    const auto size = static_cast<size_t>(none.from_bytes());
    EXPECT_EQ(step, bytes.substr(0, size) + bytes.substr(2 * size));
  }
}

}  // namespace
}  // namespace tessera
