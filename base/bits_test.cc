#include "base/bits.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

TEST(HexFloat, KnownText) {
  EXPECT_EQ(HexFloat(0.1f), "0x1.99999ap-4");
  EXPECT_EQ(HexFloat(0.1), "0x1.999999999999ap-4");
  EXPECT_EQ(HexFloat(-0.0f), "-0x0p+0");
}

template <typename T>
std::vector<T> HardValues() {
  using Limits = std::numeric_limits<T>;
  return {T{0},
          -T{0},
          T{1},
          T{1} / 3,
          Limits::min(),
          Limits::max(),
          Limits::denorm_min(),
          -Limits::max(),
          Limits::infinity(),
          -Limits::infinity()};
}

TEST(HexFloat, RoundTripsToTheBit) {
  for (const float value : HardValues<float>()) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const double wide,
                                 ParseHexDouble(HexFloat(value)));
    const auto back = static_cast<float>(wide);
    EXPECT_EQ(std::memcmp(&back, &value, sizeof(value)), 0) << value;
  }
  for (const double value : HardValues<double>()) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const double back,
                                 ParseHexDouble(HexFloat(value)));
    EXPECT_EQ(std::memcmp(&back, &value, sizeof(value)), 0) << value;
  }
  TESSERA_ASSERT_OK_AND_ASSIGN(const double nan, ParseHexDouble(HexFloat(NAN)));
  EXPECT_TRUE(std::isnan(nan));
}

TEST(ParseHexDouble, RefusesOtherText) {
  for (const char* text : {"", "x", "0x1p", "1.5 ", "1.5x"}) {
    EXPECT_THAT(ParseHexDouble(text),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  }
  EXPECT_THAT(ParseHexDouble("1.5"), IsOkAndHolds(1.5));
}

// These values must not change, since files and other processes hold them.
TEST(Fingerprint, KnownValues) {
  EXPECT_EQ(Fingerprint(nullptr, 0), 0u);
  EXPECT_EQ(Fingerprint("a", 1), 0xFB761138E1E0A78Cu);
  EXPECT_EQ(Fingerprint("tessera", 7), 0x5F2B7C8EDFC5E5B3u);
  EXPECT_EQ(Fingerprint("tessera, sh", 11), 0xFEFA61B3786AAA12u);
  EXPECT_EQ(Fingerprint("tessera, sharded", 16), 0x4AE84F3BA2CC7B34u);
}

TEST(Fingerprint, EveryBitAndLengthCounts) {
  std::set<uint64_t> seen;
  std::string data(21, '\0');
  for (int64_t bytes = 0; bytes <= 21; ++bytes) {
    EXPECT_TRUE(seen.insert(Fingerprint(data.data(), bytes)).second) << bytes;
  }
  for (size_t bit = 0; bit < data.size() * 8; ++bit) {
    data[bit / 8] ^= static_cast<char>(1 << bit % 8);
    EXPECT_TRUE(seen.insert(Fingerprint(data.data(), 21)).second) << bit;
    data[bit / 8] ^= static_cast<char>(1 << bit % 8);
  }
}

TEST(Fingerprint, OrderOfWordsCounts) {
  const double ab[] = {1, 2};
  const double ba[] = {2, 1};
  EXPECT_NE(Fingerprint(ab, sizeof(ab)), Fingerprint(ba, sizeof(ba)));
}

TEST(Fingerprint, AlignmentDoesNotCount) {
  const std::string data = "xsome bytes of a buffer";
  const std::string copy = data.substr(1);
  EXPECT_EQ(Fingerprint(data.data() + 1, 22), Fingerprint(copy.data(), 22));
}

}  // namespace
}  // namespace tessera
