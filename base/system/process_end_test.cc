#include "base/system/process_end.h"

#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::ExitedWithCode;
using ::testing::Pair;

void SayGoodbye() { std::fputs("destroyed", stderr); }

TEST(ProcessEndTest, APlanIsTheEndOfAProgram) {
  EXPECT_EXIT(
      {
        std::atexit(SayGoodbye);
        EndProcess(ProcessEnd::kPlanned, 0);
      },
      ExitedWithCode(0), "destroyed");
}

TEST(ProcessEndTest, WhatIsStuckIsNotDestroyed) {
  EXPECT_EXIT(
      {
        std::atexit(SayGoodbye);
        EndProcess(ProcessEnd::kStuck, 1);
      },
      ExitedWithCode(1), "^$");
}

TEST(ProcessEndTest, AHandlerDecides) {
  std::vector<std::pair<ProcessEnd, int>> ends;
  SetProcessEndHandler(
      [&](ProcessEnd why, int code) { ends.emplace_back(why, code); });
  EndProcess(ProcessEnd::kPlanned, 0);
  EndProcess(ProcessEnd::kLaunched, 3);
  SetProcessEndHandler(nullptr);
  EXPECT_THAT(ends, ElementsAre(Pair(ProcessEnd::kPlanned, 0),
                                Pair(ProcessEnd::kLaunched, 3)));
  EXPECT_EXIT(EndProcess(ProcessEnd::kLaunched, 3), ExitedWithCode(3), "");
}

TEST(ProcessEndTest, NobodyGoesOnWithAStuckThread) {
  EXPECT_EXIT(
      {
        SetProcessEndHandler([](ProcessEnd, int) {});
        EndProcess(ProcessEnd::kStuck, 1);
      },
      ExitedWithCode(1), "");
}

}  // namespace
}  // namespace tessera
