#include "engine/stop_signals.h"

#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>

#include "gtest/gtest.h"

namespace tessera {
namespace {

// Each of two threads gets one at the same moment, `rounds` times: from who
// signals a group of processes, and from the launcher.
void RaiseTogether(int rounds) {
  std::atomic<int> begun{0}, ended{0};
  const auto raise_each = [&] {
    for (int i = 1; i <= rounds; ++i) {
      while (begun.load() < i) std::this_thread::yield();
      raise(SIGTERM);
      ++ended;
    }
  };
  std::thread one(raise_each), other(raise_each);
  for (int i = 1; i <= rounds; ++i) {
    const std::unique_ptr<StopSignals> signals = StopSignals::Catch();
    begun = i;
    while (ended.load() < 2 * i) std::this_thread::yield();
    if (signals->received() != SIGTERM) _exit(1);
  }
  one.join();
  other.join();
}

TEST(StopSignalsTest, TwoAtOnceAreOne) {
  EXPECT_EXIT(
      {
        RaiseTogether(20'000);
        _exit(0);
      },
      testing::ExitedWithCode(0), "");
}

TEST(StopSignalsTest, WhatWasThereIsCalledTooAndComesBack) {
  static std::atomic<int> seen{0};
  signal(SIGUSR1, [](int) { ++seen; });
  {
    const std::unique_ptr<StopSignals> signals = StopSignals::Catch();
    ASSERT_NE(signals, nullptr);
    EXPECT_EQ(StopSignals::Catch(), nullptr);
    EXPECT_EQ(signals->received(), 0);
    raise(SIGUSR1);
    EXPECT_EQ(signals->received(), SIGUSR1);
    EXPECT_EQ(seen, 1);
  }
  raise(SIGUSR1);
  EXPECT_EQ(seen, 2);
  const std::unique_ptr<StopSignals> again = StopSignals::Catch();
  EXPECT_EQ(again->received(), 0);
  signal(SIGUSR1, SIG_DFL);
}

}  // namespace
}  // namespace tessera
