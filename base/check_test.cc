#include "base/check.h"

#include <signal.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/log.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

enum class Color { kRed = 4, kBlue = 5 };
struct Opaque {
  bool operator==(const Opaque&) const { return false; }
};

TEST(Check, PassesAndEvaluatesOnce) {
  int calls = 0;
  TESSERA_CHECK(++calls == 1) << "not printed";
  TESSERA_CHECK_EQ(++calls, 2) << "not printed";
  TESSERA_CHECK_NE(1, 2);
  TESSERA_CHECK_LT(1, 2);
  TESSERA_CHECK_LE(2, 2);
  TESSERA_CHECK_GT(2, 1);
  TESSERA_CHECK_GE(2, 2);
  TESSERA_CHECK_OK(absl::OkStatus());
  TESSERA_CHECK_OK(absl::StatusOr<int>(1));
  EXPECT_EQ(calls, 2);
}

TEST(CheckDeath, PrintsConditionAndText) {
  const int free_units = 0;
  EXPECT_DEATH(TESSERA_CHECK(free_units > 0) << "unit " << 7,
               "F .*check_test\\.cc:[0-9]+] Check failed: free_units > 0 "
               "unit 7");
}

TEST(CheckDeath, PrintsBothOperands) {
  const int64_t shard_numel = 3;
  EXPECT_DEATH(TESSERA_CHECK_EQ(shard_numel * 2, 7) << "layers.7",
               "Check failed: shard_numel \\* 2 == 7 \\(6 vs 7\\) layers.7");
  EXPECT_DEATH(TESSERA_CHECK_NE(1, 1), "1 != 1 \\(1 vs 1\\)");
  EXPECT_DEATH(TESSERA_CHECK_LT(2, 2), "2 < 2 \\(2 vs 2\\)");
  EXPECT_DEATH(TESSERA_CHECK_LE(3, 2), "3 <= 2 \\(3 vs 2\\)");
  EXPECT_DEATH(TESSERA_CHECK_GT(2, 2), "2 > 2 \\(2 vs 2\\)");
  EXPECT_DEATH(TESSERA_CHECK_GE(2, 3), "2 >= 3 \\(2 vs 3\\)");
}

TEST(CheckDeath, PrintsEnumsPointersAndOpaqueTypes) {
  EXPECT_DEATH(TESSERA_CHECK_EQ(Color::kRed, Color::kBlue), "\\(4 vs 5\\)");
  EXPECT_DEATH(TESSERA_CHECK_EQ(Opaque(), Opaque()), "\\(\\? vs \\?\\)");
  const int* null = nullptr;
  EXPECT_DEATH(TESSERA_CHECK_NE(null, nullptr), "vs nullptr");
}

TEST(Check, MixedSignsCompareByValue) {
  const std::vector<int> three = {1, 2, 3};
  TESSERA_CHECK_EQ(three.size(), 3);
  TESSERA_CHECK_EQ(3, three.size());
  TESSERA_CHECK_LT(-1, 0u);
  TESSERA_CHECK_LT(-1, uint64_t{0});
  TESSERA_CHECK_GT(uint32_t{1}, int64_t{-1});
  TESSERA_CHECK_NE(-1, UINT32_MAX);
  TESSERA_CHECK_GE(UINT64_MAX, -1);
  TESSERA_CHECK_LE(int64_t{-1}, uint8_t{0});
}

TEST(CheckDeath, MixedSignsFailByValue) {
  EXPECT_DEATH(TESSERA_CHECK_EQ(-1, UINT32_MAX), "-1 vs 4294967295");
  EXPECT_DEATH(TESSERA_CHECK_LT(0u, -1), "0 vs -1");
}

TEST(CheckDeath, OkPrintsTheStatus) {
  EXPECT_DEATH(TESSERA_CHECK_OK(absl::NotFoundError("gone")) << "at end",
               "is OK \\(NOT_FOUND: gone\\) at end");
}

TEST(CheckDeath, PrintsRankAndContextThenAborts) {
  const auto fail = [] {
    SetLogRank(2, 4);
    SetFatalContext([] { return std::string("last: all-gather #41"); });
    TESSERA_CHECK(false);
  };
  EXPECT_DEATH(fail(),
               " r2/4 (.|\n)*Check failed: false (.|\n)*"
               "last: all-gather #41");
  EXPECT_EXIT(fail(), ::testing::KilledBySignal(SIGABRT), "");
}

TEST(CheckDeath, ContextThatFailsItselfStillEnds) {
  const auto fail = [] {
    SetFatalContext([] {
      TESSERA_CHECK(false) << "inner";
      return std::string();
    });
    TESSERA_CHECK(false) << "outer";
  };
  // The process does not end by an overflow of the stack.
  EXPECT_EXIT(fail(), ::testing::KilledBySignal(SIGABRT), "outer(.|\n)*inner");
}

TEST(Check, NestsInUnbracedIf) {
  const auto branch = [](bool first) {
    if (first)
      TESSERA_CHECK_EQ(1, 1);
    else
      return 2;
    return 1;
  };
  EXPECT_EQ(branch(true), 1);
  EXPECT_EQ(branch(false), 2);
}

}  // namespace
}  // namespace tessera
