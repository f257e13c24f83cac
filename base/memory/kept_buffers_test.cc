#include "base/memory/kept_buffers.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::IsEmpty;

// Distinct places that are never read.
char place[5];

auto At(const char* data) { return Field(&KeptBuffers::Buffer::data, data); }

TEST(KeptBuffersTest, GivesBackTheLastOfTheSameSize) {
  KeptBuffers kept;
  EXPECT_THAT(kept.Keep({&place[0], 10}, 100), IsEmpty());
  EXPECT_THAT(kept.Keep({&place[1], 20}, 100), IsEmpty());
  EXPECT_THAT(kept.Keep({&place[2], 10}, 100), IsEmpty());
  EXPECT_EQ(kept.Take(11), nullptr);
  EXPECT_EQ(kept.Take(10), &place[2]);
  EXPECT_EQ(kept.Take(10), &place[0]);
  EXPECT_EQ(kept.Take(10), nullptr);
  EXPECT_EQ(kept.bytes(), 20);
  EXPECT_EQ(kept.Take(20), &place[1]);
  EXPECT_EQ(kept.bytes(), 0);
}

TEST(KeptBuffersTest, TheLongestKeptMakeRoom) {
  KeptBuffers kept;
  for (int i = 0; i < 4; ++i) {
    EXPECT_THAT(kept.Keep({&place[i], 22}, 100), IsEmpty());
  }
  EXPECT_THAT(kept.Keep({&place[4], 25}, 100),
              ElementsAre(At(&place[0])));  // 113 bytes are too many
  EXPECT_THAT(kept.Shrink(91), IsEmpty());
  EXPECT_THAT(kept.Shrink(50), ElementsAre(At(&place[1]), At(&place[2])));
  EXPECT_THAT(kept.Shrink(0), ElementsAre(At(&place[3]), At(&place[4])));
  EXPECT_EQ(kept.Take(22), nullptr);
  EXPECT_EQ(kept.bytes(), 0);
}

TEST(KeptBuffersTest, WhatIsTooLargeIsNotKept) {
  KeptBuffers kept;
  EXPECT_THAT(kept.Keep({&place[0], 26}, 25), ElementsAre(At(&place[0])));
  EXPECT_EQ(kept.Take(26), nullptr);
}

TEST(KeptBuffersTest, WhatIsNotTakenAgainGoesAfterSomePeriods) {
  KeptBuffers kept;
  (void)kept.Keep({&place[0], 10}, 100);
  for (int64_t i = 1; i < KeptBuffers::kPeriods; ++i) {
    EXPECT_THAT(kept.EndPeriod(), IsEmpty());
    EXPECT_EQ(kept.Take(10), &place[0]);
    (void)kept.Keep({&place[0], 10}, 100);
  }
  (void)kept.Keep({&place[1], 10}, 100);
  for (int64_t i = 1; i < KeptBuffers::kPeriods; ++i) {
    EXPECT_THAT(kept.EndPeriod(), IsEmpty());
  }
  EXPECT_THAT(kept.EndPeriod(), ElementsAre(At(&place[0]), At(&place[1])));
}

}  // namespace
}  // namespace tessera
