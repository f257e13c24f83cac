#include "comm/launch/final_lines.h"

#include <string>

#include "gtest/gtest.h"

namespace tessera {
namespace {

const absl::Duration kNow = absl::Seconds(100);
const absl::Duration kLater = kNow + FinalLines::kHeld;

TEST(RankRangesTest, NamesThem) {
  EXPECT_EQ(RankRanges({4}), "4");
  EXPECT_EQ(RankRanges({0, 1}), "0-1");
  EXPECT_EQ(RankRanges({0, 2, 3, 4, 9}), "0, 2-4, 9");
}

TEST(FinalLinesTest, OtherLinesPassAtOnce) {
  FinalLines lines(2);
  EXPECT_EQ(lines.Add(1, "step 1\n", kNow), "[1] step 1\n");
  EXPECT_EQ(lines.Add(0, "step 1\n", kNow), "[0] step 1\n");
  EXPECT_EQ(lines.Add(0, "ERROR: mine\n", kNow), "[0] ERROR: mine\n");
  EXPECT_EQ(lines.Add(0, "NOT_FOUND without a colon\n", kNow),
            "[0] NOT_FOUND without a colon\n");
  EXPECT_EQ(lines.Add(0, "\n", kNow), "[0] \n");
  EXPECT_EQ(lines.next(), absl::InfiniteDuration());
}

TEST(FinalLinesTest, AnErrorOfAllIsOneLine) {
  for (const char* error :
       {"INVALID_ARGUMENT: lr\n", "train: INVALID_ARGUMENT: lr: got 3\n"}) {
    FinalLines lines(3);
    EXPECT_EQ(lines.Add(2, error, kNow), "");
    EXPECT_EQ(lines.Add(0, error, kNow), "");
    EXPECT_EQ(lines.Add(1, error, kNow), std::string("[0-2] ") + error);
    EXPECT_EQ(lines.All(), "");
  }
}

TEST(FinalLinesTest, OfSomeAfterAWhileOrAtTheEnd) {
  FinalLines lines(4);
  EXPECT_EQ(lines.Add(3, "NOT_FOUND: a\n", kNow), "");
  EXPECT_EQ(lines.Add(0, "UNAVAILABLE: rank 3\n", kNow), "");
  EXPECT_EQ(lines.Add(2, "UNAVAILABLE: rank 3\n", kLater), "");
  EXPECT_EQ(lines.next(), kLater);
  EXPECT_EQ(lines.Due(kLater - absl::Milliseconds(1)), "");
  EXPECT_EQ(lines.Due(kLater),
            "[3] NOT_FOUND: a\n[0, 2] UNAVAILABLE: rank 3\n");
  EXPECT_EQ(lines.Add(1, "UNAVAILABLE: rank 3\n", kLater), "");
  EXPECT_EQ(lines.All(), "[1] UNAVAILABLE: rank 3\n");
}

// Those of a rank stay in order: what it says next lets go what came before.
TEST(FinalLinesTest, TheLinesOfARankStayInOrder) {
  FinalLines lines(2);
  EXPECT_EQ(lines.Add(0, "ABORTED: a\n", kNow), "");
  EXPECT_EQ(lines.Add(1, "ABORTED: b\n", kNow), "");
  EXPECT_EQ(lines.Add(0, "goes on\n", kNow), "[0] ABORTED: a\n[0] goes on\n");
  // Not with the "a" of rank 0, which has gone; nor before its own "b".
  EXPECT_EQ(lines.Add(1, "ABORTED: a\n", kNow), "");
  EXPECT_EQ(lines.Add(0, "ABORTED: b\n", kNow), "[0-1] ABORTED: b\n");
  EXPECT_EQ(lines.All(), "[1] ABORTED: a\n");
}

// Twice of one rank is not once of two.
TEST(FinalLinesTest, ARankThatRepeatsItself) {
  FinalLines lines(2);
  EXPECT_EQ(lines.Add(0, "ABORTED: a\n", kNow), "");
  EXPECT_EQ(lines.Add(0, "ABORTED: a\n", kNow), "");
  EXPECT_EQ(lines.Add(1, "ABORTED: a\n", kNow), "[0-1] ABORTED: a\n");
  EXPECT_EQ(lines.All(), "[0] ABORTED: a\n");
}

TEST(FinalLinesTest, TheLaunchersOwnComeAfterThem) {
  FinalLines lines(2);
  EXPECT_EQ(lines.AddOwn("tessera: x\n"), "tessera: x\n");
  EXPECT_EQ(lines.Add(0, "ABORTED: a\n", kNow), "");
  EXPECT_EQ(lines.AddOwn("tessera: rank 0 ended\n"), "");
  EXPECT_EQ(lines.Add(1, "ABORTED: a\n", kNow),
            "[0-1] ABORTED: a\ntessera: rank 0 ended\n");
}

}  // namespace
}  // namespace tessera
