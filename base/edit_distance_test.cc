#include "base/edit_distance.h"

#include "gtest/gtest.h"

namespace tessera {
namespace {

TEST(EditDistance, KnownValues) {
  EXPECT_EQ(EditDistance("", ""), 0);
  EXPECT_EQ(EditDistance("abc", ""), 3);
  EXPECT_EQ(EditDistance("", "abc"), 3);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3);
  EXPECT_EQ(EditDistance("stage", "stage"), 0);
  EXPECT_EQ(EditDistance("stagee", "stage"), 1);
  EXPECT_EQ(EditDistance("satge", "stage"), 1);
  EXPECT_EQ(EditDistance("AdmaW", "AdamW"), 1);
  EXPECT_EQ(EditDistance("AdmaW", "Adamax"), 2);
  EXPECT_EQ(EditDistance("ba", "ab"), 1);
  EXPECT_EQ(EditDistance("ca", "abc"), 3);  // not "ac" and then a "b" within
  EXPECT_EQ(EditDistance("abcdef", "badcfe"), 3);
  EXPECT_EQ(EditDistance("abc", "cab"), 2);
}

}  // namespace
}  // namespace tessera
