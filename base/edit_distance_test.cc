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
  EXPECT_EQ(EditDistance("satge", "stage"), 2);
}

}  // namespace
}  // namespace tessera
