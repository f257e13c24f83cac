// Tests that masters in two halves are the masters, to the bit, and how the
// upper halves are rounded.
#include "offload/remainders.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "torch/torch.h"

namespace tessera {
namespace {

// Every upper half with some lower ones: ties, what is beside them, and ends.
std::vector<uint32_t> AllBits() {
  std::vector<uint32_t> all;
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const uint32_t lower : {0x0000u, 0x0001u, 0x1234u, 0x7fffu, 0x8000u,
                                 0x8001u, 0xabcdu, 0xffffu}) {
      all.push_back(upper << 16 | lower);
    }
  }
  return all;
}

at::Tensor FloatsOf(const std::vector<uint32_t>& bits) {
  const at::Tensor floats =
      torch::empty({static_cast<int64_t>(bits.size())}, at::kFloat);
  std::memcpy(floats.mutable_data_ptr(), bits.data(), floats.nbytes());
  return floats;
}

bool IsNan(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }

struct Halves {
  explicit Halves(const at::Tensor& masters)
      : working(torch::empty(masters.sizes(), at::kBFloat16)),
        remainders(torch::empty(masters.sizes(), kRemainderDtype)) {
    SplitMasters(masters, working, remainders);
  }
  uint16_t upper(size_t i) const {
    return static_cast<const uint16_t*>(working.const_data_ptr())[i];
  }
  at::Tensor working, remainders;
};

TEST(RemaindersTest, BothHalvesAreTheMaster) {
  const std::vector<uint32_t> all = AllBits();
  const Halves halves(FloatsOf(all));
  const at::Tensor joined = torch::empty(halves.working.sizes(), at::kFloat);
  JoinMasters(halves.working, halves.remainders, joined);
  const auto* const bits =
      static_cast<const uint32_t*>(joined.const_data_ptr());
  for (size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(bits[i], IsNan(all[i]) ? 0x7fc00000 : all[i])
        << std::hex << all[i];
  }
}

TEST(RemaindersTest, ThereIsOneNan) {
  const std::vector<uint32_t> all = {0x7f800001, 0xffffffff, 0x7fc01234};
  const Halves halves(FloatsOf(all));
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(halves.upper(i), 0x7fc0);
  EXPECT_TRUE(halves.remainders.eq(0).all().item<bool>());
}

// As copy_ rounds, except for ties, where that goes to the even neighbour.
TEST(RemaindersTest, UpperHalvesAreTheNearestAndTiesGoAwayFromZero) {
  const std::vector<uint32_t> all = AllBits();
  const at::Tensor masters = FloatsOf(all);
  const Halves halves(masters);
  const at::Tensor even = masters.to(at::kBFloat16);
  const auto* const rounded =
      static_cast<const uint16_t*>(even.const_data_ptr());
  int64_t others = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    if (IsNan(all[i])) continue;
    const bool tie = (all[i] & 0xffff) == 0x8000;
    const uint16_t expected =
        tie ? static_cast<uint16_t>((all[i] >> 16) + 1) : rounded[i];
    ASSERT_EQ(halves.upper(i), expected) << std::hex << all[i];
    others += expected != rounded[i] ? 1 : 0;
  }
  EXPECT_GT(others, 0x7000);
  EXPECT_TRUE(at::equal(RoundTiesAway(masters).view(at::kShort),
                        halves.working.view(at::kShort)));
}

// More than one piece, and of another dtype.
TEST(RemaindersTest, LargeTensorsAndDoubles) {
  torch::manual_seed(1);
  const at::Tensor masters = torch::randn({(int64_t{1} << 20) + 77});
  const Halves halves(masters), doubles(masters.to(at::kDouble));
  const at::Tensor joined = torch::empty_like(masters);
  JoinMasters(halves.working, halves.remainders, joined);
  EXPECT_TRUE(at::equal(joined, masters));
  EXPECT_TRUE(at::equal(doubles.working, halves.working));
  EXPECT_TRUE(at::equal(doubles.remainders, halves.remainders));
  EXPECT_TRUE(at::equal(RoundTiesAway(masters), halves.working));
}

}  // namespace
}  // namespace tessera
