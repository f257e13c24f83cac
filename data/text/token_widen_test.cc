#include "data/text/token_widen.h"

#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace tessera {
namespace {

template <typename T>
class WidenTokensTest : public ::testing::Test {};
using Types = ::testing::Types<uint8_t, uint16_t, uint32_t>;
TYPED_TEST_SUITE(WidenTokensTest, Types);

// Every set of instructions that this processor has, over sizes at the borders
// of vectors and blocks; the largest stands at every place in turn.
TYPED_TEST(WidenTokensTest, CopiesAndFindsTheLargest) {
  constexpr TypeParam kMax = std::numeric_limits<TypeParam>::max();
  for (int isa = 0; isa <= static_cast<int>(BestIsa()); ++isa) {
    for (const int64_t count : {0, 1, 7, 31, 32, 33, 65, 1023, 1024, 1025}) {
      std::vector<TypeParam> in(static_cast<size_t>(count));
      for (size_t i = 0; i < in.size(); ++i) {
        in[i] = static_cast<TypeParam>((i * 7) % 100);
      }
      std::vector<int64_t> out(in.size() + 1, -1);
      for (int64_t peak = 0; peak < count; peak += 1 + count / 50) {
        const TypeParam before = in[peak];
        in[peak] = kMax;
        EXPECT_EQ(WidenTokens(in.data(), count, out.data(), Isa(isa)), kMax);
        for (int64_t i = 0; i < count; ++i) ASSERT_EQ(out[i], int64_t{in[i]});
        EXPECT_EQ(out[count], -1);
        in[peak] = before;
      }
    }
  }
  EXPECT_EQ(WidenTokens(static_cast<const TypeParam*>(nullptr), 0, nullptr),
            0u);
}

}  // namespace
}  // namespace tessera
