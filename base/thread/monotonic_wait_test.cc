#include "base/thread/monotonic_wait.h"

#include <memory>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/thread/deadline.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

constexpr absl::Duration kShort = absl::Milliseconds(20);

TEST(DeadlineTest, PassesAfterItsTime) {
  const Deadline deadline = Deadline::After(kShort);
  EXPECT_LE(deadline.Left(), kShort);
  EXPECT_TRUE(Deadline::After(absl::ZeroDuration()).HasPassed());
  EXPECT_FALSE((deadline + absl::Hours(1)).HasPassed());
  EXPECT_TRUE(deadline < deadline + kShort);
  EXPECT_FALSE(deadline < deadline);
  while (!deadline.HasPassed()) std::this_thread::yield();
  EXPECT_LE(deadline.Left(), absl::ZeroDuration());
  EXPECT_FALSE(Deadline::Never().HasPassed());
  EXPECT_EQ(Deadline::Never().Left(), absl::InfiniteDuration());
  EXPECT_TRUE(deadline < Deadline::Never());
}

TEST(MonotonicNotificationTest, WaitsForItsTimeOrTheNotification) {
  MonotonicNotification done;
  EXPECT_FALSE(done.HasBeenNotified());
  EXPECT_FALSE(done.WaitFor(-absl::InfiniteDuration()));
  const Deadline deadline = Deadline::After(kShort);
  EXPECT_FALSE(done.WaitFor(kShort));
  EXPECT_TRUE(deadline.HasPassed());
  std::thread thread([&] { done.Notify(); });
  done.Wait();
  EXPECT_TRUE(done.WaitFor(absl::ZeroDuration()));
  EXPECT_TRUE(done.HasBeenNotified());
  thread.join();
}

// A waiter may destroy the object while Notify returns.
TEST(MonotonicNotificationTest, MayBeDestroyedAfterAWait) {
  for (int i = 0; i < 100; ++i) {
    auto done = std::make_unique<MonotonicNotification>();
    std::thread thread([&] { done->Notify(); });
    EXPECT_TRUE(done->WaitFor(absl::InfiniteDuration()));
    done = nullptr;
    thread.join();
  }
}

// The threads take turns: each sees what the other changes before it waits.
TEST(MonotonicMutexTest, WaitersWakeEachOther) {
  MonotonicMutex mutex;
  int turn = 0;
  bool stuck = false;
  const auto play = [&](int own, bool timed) {
    const auto mine = [&] { return turn % 3 == own || stuck; };
    MonotonicMutexLock lock(&mutex);
    for (int i = 0; i < 200 && !stuck; ++i) {
      if (timed) {
        stuck |= !mutex.AwaitFor(absl::Condition(&mine), absl::Seconds(20));
      } else {
        mutex.Await(absl::Condition(&mine));
      }
      ++turn;
    }
  };
  std::thread second([&] { play(1, true); }), third([&] { play(2, false); });
  play(0, true);
  second.join();
  third.join();
  MonotonicMutexLock lock(&mutex);
  EXPECT_FALSE(stuck);
  EXPECT_EQ(turn, 600);
}

TEST(MonotonicMutexTest, ATimeoutTellsWhatIsSo) {
  MonotonicMutex mutex;
  bool set = false;
  MonotonicMutexLock lock(&mutex);
  EXPECT_FALSE(mutex.AwaitFor(absl::Condition(&set), kShort));
  set = true;
  EXPECT_TRUE(mutex.AwaitFor(absl::Condition(&set), -kShort));
}

}  // namespace
}  // namespace tessera
