#include "base/layout/layout.h"

#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace tessera {
namespace {

using Sizes = std::vector<int64_t>;

// Lists of storages, in elements, that lie around what W and the alignment
// divide.
std::vector<Sizes> Cases(int64_t world_size) {
  const int64_t w = world_size;
  std::vector<Sizes> cases = {{}, {0}, {1}, {kAlignElements}};
  for (int64_t numel :
       {w - 1, w, w + 1, int64_t{7}, int64_t{61}, int64_t{64}, int64_t{67},
        int64_t{1009}, 64 * w - 1, 64 * w, 64 * w + 1, int64_t{65537}}) {
    cases.push_back({numel});
    cases.push_back({numel, 1, 0, numel + 2});
    cases.push_back({1, numel, numel});
  }
  return cases;
}

class FlatLayoutTest : public ::testing::TestWithParam<int> {
 protected:
  // Calls check(layout, sizes) for each case.
  template <typename Check>
  void ForEachCase(Check check) {
    for (const Sizes& sizes : Cases(GetParam())) {
      SCOPED_TRACE(::testing::PrintToString(sizes));
      check(FlatLayout(sizes, GetParam()), sizes);
    }
  }
};

TEST_P(FlatLayoutTest, SlotsAreAlignedDisjointAndInOrder) {
  ForEachCase([](const FlatLayout& layout, const Sizes& sizes) {
    ASSERT_EQ(layout.num_slots(), static_cast<int>(sizes.size()));
    int64_t end = 0, payload = 0;
    for (int i = 0; i < layout.num_slots(); ++i) {
      EXPECT_EQ(layout.slot(i).begin % kAlignElements, 0);
      EXPECT_EQ(layout.slot(i).numel(), sizes[i]);
      EXPECT_GE(layout.slot(i).begin, end);
      end = layout.slot(i).end;
      payload += sizes[i];
    }
    EXPECT_LE(end, layout.whole_numel());
    EXPECT_EQ(layout.payload_numel(), payload);
  });
}

TEST_P(FlatLayoutTest, ShardsCoverTheFlatBufferOnce) {
  ForEachCase([](const FlatLayout& layout, const Sizes&) {
    int64_t end = 0;
    for (int r = 0; r < layout.world_size(); ++r) {
      EXPECT_EQ(layout.shard(r).begin, end);
      EXPECT_EQ(layout.shard(r).numel(), layout.shard_numel());
      end = layout.shard(r).end;
    }
    EXPECT_EQ(end, layout.whole_numel());
    EXPECT_EQ(layout.shard_numel() % kAlignElements, 0);
  });
}

TEST_P(FlatLayoutTest, SlotsAreCutAtMultiplesOfTheAlignment) {
  ForEachCase([](const FlatLayout& layout, const Sizes&) {
    for (int i = 0; i < layout.num_slots(); ++i) {
      int64_t covered = 0;
      for (int r = 0; r < layout.world_size(); ++r) {
        const Range part = Intersect(layout.slot(i), layout.shard(r));
        if (part.empty()) continue;
        EXPECT_EQ((part.begin - layout.slot(i).begin) % kAlignElements, 0);
        covered += part.numel();
      }
      EXPECT_EQ(covered, layout.slot(i).numel());
    }
  });
}

TEST_P(FlatLayoutTest, PaddingIsLessThanOneAlignmentPerSlotAndRank) {
  ForEachCase([](const FlatLayout& layout, const Sizes&) {
    const int64_t padding = layout.whole_numel() - layout.payload_numel();
    EXPECT_GE(padding, 0);
    EXPECT_LE(padding,
              kAlignElements * (layout.num_slots() + layout.world_size()));
  });
}

INSTANTIATE_TEST_SUITE_P(All, FlatLayoutTest,
                         ::testing::Values(1, 2, 3, 4, 5, 7, 8, 64),
                         [](const auto& info) {
                           return "World" + std::to_string(info.param);
                         });

TEST(FlatLayout, IsEmptyWithoutSlots) {
  const FlatLayout layout({}, 3);
  EXPECT_EQ(layout.whole_numel(), 0);
  EXPECT_TRUE(layout.shard(2).empty());
}

TEST(FlatLayout, PlacesAnExampleAsTheHeaderDrawsIt) {
  const FlatLayout layout({1000, 40, 600}, 2);
  EXPECT_EQ(layout.slot(0).begin, 0);
  EXPECT_EQ(layout.slot(1).begin, 1024);
  EXPECT_EQ(layout.slot(2).begin, 1088);
  EXPECT_EQ(layout.slot(2).end, 1688);
  EXPECT_EQ(layout.shard_numel(), 896);  // 1728 / 2 = 864, aligned up
  EXPECT_EQ(layout.whole_numel(), 1792);
}

TEST(Range, IntersectsToWhatBothHold) {
  const Range part = Intersect({0, 10}, {4, 20});
  EXPECT_EQ(part.begin, 4);
  EXPECT_EQ(part.end, 10);
  EXPECT_TRUE(Intersect({0, 4}, {4, 8}).empty());
  EXPECT_TRUE(Intersect({9, 12}, {0, 3}).empty());
  EXPECT_EQ(Intersect({9, 12}, {0, 3}).numel(), 0);
}

TEST(AlignUp, GivesTheNextMultiple) {
  EXPECT_EQ(AlignUp(0), 0);
  EXPECT_EQ(AlignUp(1), kAlignElements);
  EXPECT_EQ(AlignUp(kAlignElements), kAlignElements);
  EXPECT_EQ(AlignUp(kAlignElements + 1), 2 * kAlignElements);
}

}  // namespace
}  // namespace tessera
