#include "base/kept_buffers.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::IsEmpty;

// Places that are told apart and never read.
char place[5];

auto At(const char* data) { return Field(&KeptBuffers::Buffer::data, data); }

TEST(KeptBuffersTest, GivesBackTheLastOfTheSameSize) {
  KeptBuffers kept(100);
  EXPECT_THAT(kept.Keep({&place[0], 10}), IsEmpty());
  EXPECT_THAT(kept.Keep({&place[1], 20}), IsEmpty());
  EXPECT_THAT(kept.Keep({&place[2], 10}), IsEmpty());
  EXPECT_EQ(kept.Take(11), nullptr);
  EXPECT_EQ(kept.Take(10), &place[2]);
  EXPECT_EQ(kept.Take(10), &place[0]);
  EXPECT_EQ(kept.Take(10), nullptr);
  EXPECT_EQ(kept.Take(20), &place[1]);
}

TEST(KeptBuffersTest, TheLongestKeptMakeRoom) {
  KeptBuffers kept(100);
  for (int i = 0; i < 4; ++i) {
    EXPECT_THAT(kept.Keep({&place[i], 22}), IsEmpty());
  }
  EXPECT_THAT(kept.Keep({&place[4], 25}),
              ElementsAre(At(&place[0])));  // 113 bytes are too many
  EXPECT_THAT(kept.Drop(), ElementsAre(At(&place[1]), At(&place[2]),
                                       At(&place[3]), At(&place[4])));
  EXPECT_EQ(kept.Take(22), nullptr);
}

TEST(KeptBuffersTest, LargeOnesAreNotKept) {
  KeptBuffers kept(100);
  EXPECT_THAT(kept.Keep({&place[0], 26}), ElementsAre(At(&place[0])));
  EXPECT_EQ(kept.Take(26), nullptr);
  KeptBuffers none(0);
  EXPECT_THAT(none.Keep({&place[0], 1}), ElementsAre(At(&place[0])));
}

TEST(KeptBuffersTest, WhatWasTakenMakesRoom) {
  KeptBuffers kept(40);
  for (int i = 0; i < 4; ++i) (void)kept.Keep({&place[i], 10});
  EXPECT_EQ(kept.Take(10), &place[3]);
  EXPECT_THAT(kept.Keep({&place[4], 10}), IsEmpty());
}

}  // namespace
}  // namespace tessera
