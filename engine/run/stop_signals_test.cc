#include "engine/run/stop_signals.h"

#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>

#include "base/system/process_defaults.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

void Await(const std::atomic<int>& count, int least) {
  for (int spins = 0; count.load() < least; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
}

void Spend(int turns) {
  for (std::atomic<int> i{0}; i < turns;) ++i;
}

// Each of two threads gets one at nearly the same moment, `rounds` times: from
// who signals a group of processes, and from the launcher. Now the one is a bit
// earlier, now the other.
void RaiseTogether(int rounds) {
  std::atomic<int> begun{0}, ready{0}, ended{0};
  std::thread other([&] {
    for (int i = 1; i <= rounds; ++i) {
      Await(begun, i);
      ready = i;
      Spend(i % 50);
      raise(SIGTERM);
      ended = i;
    }
  });
  for (int i = 1; i <= rounds; ++i) {
    const std::unique_ptr<StopSignals> signals = StopSignals::Catch();
    begun = i;
    Await(ready, i);
    Spend(i / 50 % 50);
    raise(SIGTERM);
    Await(ended, i);
    if (signals->received() != SIGTERM) _exit(1);
  }
  other.join();
}

TEST(StopSignalsTest, TwoAtOnceAreOne) {
  EXPECT_EXIT(
      {
        RaiseTogether(50'000);
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

// What Init has put there is no program's handler: it says that nobody saves.
TEST(StopSignalsTest, InsteadOfWhatInitHasPutThere) {
  SurviveSignals();
  const std::unique_ptr<StopSignals> signals = StopSignals::Catch();
  testing::internal::CaptureStderr();
  raise(SIGUSR1);
  raise(SIGUSR1);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(signals->received(), SIGUSR1);
}

}  // namespace
}  // namespace tessera
