#include "comm/comm_thread.h"

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "base/status_matchers.h"
#include "base/thread/no_threads_test_util.h"
#include "base/trace/exposed.h"
#include "comm/comm_promise.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

// And the next one tries again.
TEST(CommThreadTest, WithoutAThreadTheFutureIsAnError) {
  CommThread thread;
  bool ran = false;
  const CommThread::Work work = [&] {
    ran = true;
    return absl::OkStatus();
  };
  {
    const NoThreads none;
    EXPECT_THAT(thread.Post(work).Wait(),
                StatusIs(absl::StatusCode::kResourceExhausted,
                         HasSubstr("tessera-comm")));
  }
  EXPECT_FALSE(ran);
  TESSERA_EXPECT_OK(thread.Post(work).Wait());
  EXPECT_TRUE(ran);
  thread.Stop();
}

// It would be an error of what the communication thread ends itself.
TEST(CommPromiseTest, TheCommunicationThreadMayWait) {
  CommThread thread;
  for (const absl::Status& status :
       {absl::OkStatus(), absl::DataLossError("a disk")}) {
    CommPromise promise;
    absl::Notification waits;
    int value = 0, seen = 0;
    const CommFuture future = thread.Post([&] {
      waits.Notify();
      const absl::Status ended = promise.future().Wait();
      seen = value;
      return ended;
    });
    waits.WaitForNotification();
    value = 7;
    promise.End(status);
    EXPECT_EQ(future.Wait(), status);
    EXPECT_EQ(seen, 7);
    EXPECT_EQ(promise.future().Wait(), status);
  }
  thread.Stop();
}

TEST(ExposedTest, AWaitThatBlocksTheProgramCounts) {
  CommThread thread;
  const int64_t others = ExposedNanos(WaitReason::kGather);
  const int64_t before = ExposedNanos(WaitReason::kReduction);
  // One may have ended before it is waited for, but not all of them.
  for (int i = 0; i < 10000; ++i) {
    const CommFuture future = thread.Post(
        [] {
          const int64_t until = TraceNow() + 1000000;
          while (TraceNow() < until) {
          }
          return absl::OkStatus();
        },
        {WaitReason::kReduction, "sum"});
    TESSERA_EXPECT_OK(future.Wait());
    if (ExposedNanos(WaitReason::kReduction) > before) break;
  }
  EXPECT_GT(ExposedNanos(WaitReason::kReduction), before);
  EXPECT_EQ(ExposedNanos(WaitReason::kGather), others);
  thread.Stop();
}

TEST(ExposedTest, AWaitOfTheCommunicationThreadDoesNot) {
  CommThread thread;
  const int64_t before = ExposedNanos(WaitReason::kUpdate);
  for (int i = 0; i < 20; ++i) {
    CommPromise promise;
    absl::Notification waits;
    const CommFuture future = thread.Post([&] {
      waits.Notify();
      return promise.future().Wait();
    });
    waits.WaitForNotification();
    promise.End(absl::OkStatus());
    TESSERA_EXPECT_OK(future.Wait());
  }
  EXPECT_EQ(ExposedNanos(WaitReason::kUpdate), before);
  thread.Stop();
}

TEST(CommThreadDeathTest, ItMayNotWaitForItself) {
  EXPECT_DEATH(
      {
        CommThread thread;
        CommFuture later;
        absl::Notification go;
        const CommFuture future = thread.Post([&] {
          go.WaitForNotification();
          return later.Wait();
        });
        later = thread.Post([] { return absl::OkStatus(); });
        go.Notify();
        (void)future.Wait();
      },
      "pending collective on the communication thread");
}

}  // namespace
}  // namespace tessera
