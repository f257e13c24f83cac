#include "data/text/token_widen.h"

#include <limits>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace tessera {
namespace {

template <typename T>
class WidenTokensTest : public ::testing::Test {};
using Types =
    ::testing::Types<std::pair<uint8_t, int32_t>, std::pair<uint8_t, int64_t>,
                     std::pair<uint16_t, int32_t>, std::pair<uint16_t, int64_t>,
                     std::pair<uint32_t, int32_t>,
                     std::pair<uint32_t, int64_t>>;
TYPED_TEST_SUITE(WidenTokensTest, Types);

// Every set of instructions that this processor has, over sizes at the borders
// of vectors, blocks and of what is asked for ahead; the largest stands at
// every place in turn.
TYPED_TEST(WidenTokensTest, CopiesAndFindsTheLargest) {
  using In = typename TypeParam::first_type;
  using Out = typename TypeParam::second_type;
  constexpr In kMax = std::numeric_limits<In>::max();
  constexpr int64_t kAhead = kWidenAheadBytes / int64_t{sizeof(In)};
  for (int isa = 0; isa <= static_cast<int>(BestIsa()); ++isa) {
    for (const int64_t count :
         {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{31}, int64_t{64},
          int64_t{65}, int64_t{1025}, kAhead, kAhead + 1, kAhead + 97}) {
      std::vector<In> in(static_cast<size_t>(count));
      for (size_t i = 0; i < in.size(); ++i) {
        in[i] = static_cast<In>((i * 7) % 251);
      }
      std::vector<Out> out(in.size() + 1, -1);
      for (int64_t peak = 0; peak < count; peak += 1 + count / 50) {
        const In before = in[peak];
        in[peak] = kMax;
        const void* const next = peak % 2 == 0 ? &in[peak] : nullptr;
        EXPECT_EQ(WidenTokens(in.data(), count, out.data(), next, Isa(isa)),
                  kMax);
        for (int64_t i = 0; i < count; ++i) {
          ASSERT_EQ(out[i], static_cast<Out>(in[i])) << i;
        }
        EXPECT_EQ(out[count], -1);
        in[peak] = before;
      }
    }
  }
  EXPECT_EQ(WidenTokens(static_cast<const In*>(nullptr), 0,
                        static_cast<Out*>(nullptr)),
            0u);
}

}  // namespace
}  // namespace tessera
