// What is left behind by a wait that does not end: files, and the end of the
// process; and the thread that looks by itself, in real time.
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "comm/record/flight_recorder.h"
#include "comm/record/hang_dump.h"
#include "comm/watch/wait_monitor.h"
#include "comm/watch/watch_testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class DumpTest : public MonitorTest {
 protected:
  DumpTest() { SetHangDumpFolder(testing::TempDir()); }
};

std::string DumpPath(int rank) {
  return absl::StrCat(absl::StripSuffix(testing::TempDir(), "/"),
                      "/tessera-hang-rank", rank, "-pid", getpid(), ".txt");
}

// In real time, on the process's own watching thread.
TEST_F(DumpTest, TimeoutLeavesTheLastCollectivesAndAllStacks) {
#if __has_feature(thread_sanitizer)
  GTEST_SKIP() << "a thread that waits gets signals after its wait";
#endif
  FlightRecorder ring;
  CollectiveRecord record;
  record.what = "gradient of unit q";
  ring.Enter(ring.Enqueue(record), 7);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto a = std::move(Announcements::Create(store, 0, 2)).value();
  const auto b = std::move(Announcements::Create(store, 1, 2)).value();
  absl::Notification aborted;
  WaitMonitor monitor(a.get(), {absl::Milliseconds(200), absl::Seconds(60)});
  monitor.Begin({7, 1234, "all-gather of unit x"},
                Both([&] { aborted.Notify(); }));
  aborted.WaitForNotification();
  EXPECT_THAT(monitor.End(absl::CancelledError("aborted")),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       AllOf(HasSubstr("all-gather of unit x #7 has not ended "
                                       "within 200ms: rank 1 has not come"),
                             HasSubstr(DumpPath(0)))));
  TESSERA_ASSERT_OK_AND_ASSIGN(const std::string dump,
                               ReadWholeFile(DumpPath(0)));
  EXPECT_THAT(dump, ContainsRegex("#7 +RUNNING.*gradient of unit q"));
  EXPECT_THAT(dump, HasSubstr("all-gather of unit x #7"));
  EXPECT_THAT(dump, HasSubstr("\"tessera-watch\" "));
  // This thread, where it waits.
  EXPECT_THAT(dump, HasSubstr("WaitForNotification"));
  struct stat info = {};
  ASSERT_EQ(stat(DumpPath(0).c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST_F(DumpTest, NothingIsLeftIfSwitchedOff) {
  unlink(DumpPath(0).c_str());
  SetHangDumpFolder("off");
  EXPECT_THAT(
      WaitUntilAborted(absl::Seconds(2), absl::Seconds(60)),
      StatusIs(absl::StatusCode::kDeadlineExceeded, Not(HasSubstr("stacks"))));
  EXPECT_NE(access(DumpPath(0).c_str(), F_OK), 0);
}

// Rank 1 never waits; the others gave up because of it.
TEST_F(DumpTest, ARankThatIsGivenUpLeavesItsStacksToo) {
  unlink(DumpPath(1).c_str());
  WaitMonitor monitor(b_.get(), {absl::Seconds(60), absl::Seconds(5),
                                 kAbortGrace, /*on_watchdog=*/false});
  monitor.Begin({1, 1, "x"}, Both());
  TESSERA_EXPECT_OK(monitor.End(absl::OkStatus()));
  monitor.Look();
  a_->Post(absl::DeadlineExceededError("rank 1 has not come"), true);
  clock_.Advance(absl::Seconds(1));
  monitor.Look();
  EXPECT_THAT(ReadWholeFile(DumpPath(1)).value_or(""),
              AllOf(HasSubstr("rank 1 has not come"),
                    HasSubstr("ARankThatIsGivenUpLeaves")));
}

// A file system that does not answer, as those of networks do.
TEST_F(DumpTest, AFolderThatDoesNotAnswerHoldsNoVerdict) {
  // The thread that writes may be a little longer in them than this test.
  const auto answers = std::make_shared<absl::Notification>();
  const auto returned = std::make_shared<absl::Notification>();
  SetHangDumpWriterForTesting({[=](const std::string&, const std::string&) {
                                 answers->WaitForNotificationWithTimeout(
                                     kEnough);
                                 returned->Notify();
                                 return 0;
                               },
                               /*patience=*/absl::ZeroDuration()});
  EXPECT_THAT(
      WaitUntilAborted(absl::Seconds(2), absl::Seconds(60)),
      StatusIs(absl::StatusCode::kDeadlineExceeded, Not(HasSubstr("stacks"))));
  EXPECT_FALSE(returned->HasBeenNotified()) << "it was waited for";
  answers->Notify();
  returned->WaitForNotification();
  SetHangDumpWriterForTesting({});
}

// ---- a backend that cannot abort ----

using MonitorDeathTest = MonitorTest;

TEST_F(MonitorDeathTest, AWaitThatCannotBeEndedEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        WaitMonitor monitor(a_.get(), {absl::Seconds(60), absl::Seconds(60),
                                       /*abort_grace=*/absl::Seconds(30),
                                       /*on_watchdog=*/false});
        monitor.Begin({7, 1234, "all-gather of unit x"}, Both());
        clock_.Advance(absl::Seconds(60));
        monitor.Look();
        clock_.Advance(absl::Seconds(30) - absl::Nanoseconds(1));
        monitor.Look();
        fprintf(stderr, "it may still end\n");
        clock_.Advance(absl::Nanoseconds(1));
        monitor.Look();
      },
      testing::ExitedWithCode(1),
      "it may still end(.|\n)*all-gather of unit x #7 has not ended within 1m: "
      ".*rank 1 has not come.*the wait cannot be ended \\(30s have passed\\), "
      "so this process ends");
}

}  // namespace
}  // namespace tessera
