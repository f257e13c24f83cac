// Announcements, and the monitor that ends waits: what it says, and when.
#include "comm/watch/wait_monitor.h"

#include <sys/stat.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "comm/record/flight_recorder.h"
#include "comm/record/hang_dump.h"
#include "comm/rendezvous/bounded_store.h"
#include "comm/watch/announcements.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

// Two ranks' boards over one store.
class BoardTest : public testing::Test {
 protected:
  std::unique_ptr<Announcements> AnnouncementSnapshot(int rank) {
    return std::move(Announcements::Create(store_, rank, 2)).value();
  }
  c10::intrusive_ptr<c10d::Store> store_ =
      c10::make_intrusive<c10d::HashStore>();
  std::unique_ptr<Announcements> a_ = AnnouncementSnapshot(0);
  std::unique_ptr<Announcements> b_ = AnnouncementSnapshot(1);
};

TEST_F(BoardTest, SaysAndTakesBack) {
  EXPECT_THAT(a_->Read(), IsEmpty());
  b_->Retract();  // nothing to take back
  EXPECT_THAT(a_->Read(), IsEmpty());
  b_->Post(b_->FailedHere(absl::DataLossError("file gone, twice")), false);
  std::vector<Announcement> said = a_->Read();
  ASSERT_THAT(said, SizeIs(1));
  EXPECT_EQ(said[0].rank, 1);
  EXPECT_EQ(said[0].count, 1);
  EXPECT_FALSE(said[0].final);
  EXPECT_EQ(said[0].status,
            absl::UnavailableError("rank 1 failed: file gone, twice"));
  EXPECT_THAT(b_->Read(), IsEmpty());
  b_->Retract();
  EXPECT_THAT(a_->Read(), IsEmpty());
  b_->Post(absl::UnavailableError("again"), true);
  ASSERT_THAT(a_->Read(), SizeIs(1));
  EXPECT_EQ(a_->Read()[0].count, 2);
  b_->Retract();  // a final one stays
  EXPECT_THAT(a_->Read(), SizeIs(1));
}

TEST_F(BoardTest, AllPosted) {
  EXPECT_FALSE(a_->AllPosted(absl::ZeroDuration()));
  a_->Post(absl::InternalError("a"), false);
  EXPECT_FALSE(a_->AllPosted(absl::Milliseconds(20)));
  b_->Post(absl::InternalError("b"), false);
  EXPECT_TRUE(b_->AllPosted(absl::ZeroDuration()));
  b_->Retract();
  // b saw all and took its own back before a looked.
  EXPECT_TRUE(a_->AllPosted(absl::ZeroDuration()));
  a_->Retract();
  // The next time nothing of that counts.
  b_->Post(absl::InternalError("b"), false);
  EXPECT_FALSE(b_->AllPosted(absl::Milliseconds(20)));
}

// The group of both.
std::shared_ptr<const WatchedGroup> Both(std::function<void()> abort = [] {}) {
  return std::make_shared<WatchedGroup>(
      WatchedGroup{"", {0, 1}, std::move(abort)});
}

class MonitorTest : public BoardTest {
 protected:
  MonitorTest() { SetHangDumpFolder(testing::TempDir()); }

  // Waits, as a transport would, until the monitor aborts.
  absl::Status WaitUntilAborted(absl::Duration timeout, absl::Duration grace) {
    absl::Notification aborted;
    WaitMonitor monitor(a_.get(), {timeout, grace});
    monitor.Begin(
        {7, 1234, "all-gather of unit x", "all-gather, 64 bytes of float32"},
        Both([&] { aborted.Notify(); }));
    monitor.SetAwaited(1);
    aborted.WaitForNotification();
    return monitor.End(absl::CancelledError("aborted"));
  }
};

TEST_F(MonitorTest, TimeoutNamesTheCollectiveAndWhoWaitsWhere) {
  b_->SetWaiting({8, 99, "reduce-scatter of unit y"});
  EXPECT_THAT(
      WaitUntilAborted(absl::Milliseconds(200), absl::Seconds(60)),
      StatusIs(
          absl::StatusCode::kDeadlineExceeded,
          AllOf(HasSubstr("all-gather of unit x #7 (all-gather, 64 bytes of "
                          "float32) has not ended within 200ms"),
                HasSubstr("rank 1 is in reduce-scatter of unit y #8"),
                HasSubstr("rank 0 has waited in it for "))));
  // What failed here is final for the others.
  ASSERT_THAT(b_->Read(), SizeIs(1));
  EXPECT_TRUE(b_->Read()[0].final);
}

TEST_F(MonitorTest, DifferentCollectivesOfOneNumberAreNamedLongBefore) {
  b_->SetWaiting({7, 99, "reduce-scatter of unit y",
                  "reduce-scatter sum, 8 bytes of float64"});
  const absl::Time begin = absl::Now();
  EXPECT_THAT(
      WaitUntilAborted(absl::Seconds(600), absl::Seconds(300)),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("rank 0 in all-gather of unit x #7 (all-gather, "
                               "64 bytes of float32), rank 1 in "
                               "reduce-scatter of unit y #7 (reduce-scatter "
                               "sum, 8 bytes of float64)"))));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(1));
}

// Rank 0 has waited for long, and looks rarely by now.
TEST_F(MonitorTest, ARankThatComesLateToAnotherCollectiveIsNoticedSoon) {
  absl::Notification aborted;
  WaitMonitor monitor(a_.get(), {absl::Seconds(600), absl::Seconds(300)});
  monitor.Begin({7, 1234, "all-gather of unit x"},
                Both([&] { aborted.Notify(); }));
  EXPECT_FALSE(aborted.WaitForNotificationWithTimeout(absl::Seconds(2)));
  b_->SetWaiting({7, 99, "reduce-scatter of unit y"});
  EXPECT_TRUE(aborted.WaitForNotificationWithTimeout(absl::Seconds(1)));
  EXPECT_THAT(monitor.End(absl::CancelledError("aborted")),
              StatusIs(absl::StatusCode::kFailedPrecondition));
}

// ---- several groups ----

TEST_F(MonitorTest, EqualNumbersOfTwoGroupsAreNoMismatch) {
  WaitingIn elsewhere{7, 99, "reduce-scatter of unit y"};
  elsewhere.group = "halves 1.0";
  b_->SetWaiting(elsewhere);
  EXPECT_THAT(
      WaitUntilAborted(absl::Milliseconds(500), absl::Seconds(60)),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               HasSubstr("rank 1 has not come (it is in reduce-scatter of unit "
                         "y #7)")));
}

TEST_F(MonitorTest, ARankThatHasComeMayBeInAnotherGroupByNow) {
  WaitingIn elsewhere{2, 99, "reduce-scatter of unit y"};
  elsewhere.group = "halves 1.0";
  elsewhere.begun = {{"", 7}, {"halves 1.0", 2}};
  b_->SetWaiting(elsewhere);
  EXPECT_THAT(WaitUntilAborted(absl::Milliseconds(200), absl::Seconds(60)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("within 200ms: rank 1 is in reduce-scatter of "
                                 "unit y #2; rank 0 has waited")));
}

TEST_F(MonitorTest, PublishesTheLastCollectiveOfEachGroupThatIsLeft) {
  WaitMonitor monitor(b_.get(), {absl::Seconds(60), absl::Seconds(5)});
  auto half = std::make_shared<WatchedGroup>(WatchedGroup{"half", {1}, [] {}});
  b_->Post(absl::InternalError("so that it is published at once"), false);
  const WaitingIn in_half{4, 1, "x", "", false, 0, "half"};
  const WaitingIn in_both{9, 1, "y"};
  monitor.Begin({4, 1, "x"}, half);
  TESSERA_EXPECT_OK(monitor.End(absl::OkStatus()));
  monitor.Begin({9, 1, "y"}, Both());
  EXPECT_TRUE(a_->ReadSnapshot()->waiting[1]->HasBegun(in_half));
  EXPECT_TRUE(a_->ReadSnapshot()->waiting[1]->HasBegun(in_both));
  TESSERA_EXPECT_OK(monitor.End(absl::OkStatus()));
  monitor.Forget("half");
  monitor.Begin({10, 1, "z"}, Both());
  EXPECT_FALSE(a_->ReadSnapshot()->waiting[1]->HasBegun(in_half));
  EXPECT_TRUE(a_->ReadSnapshot()->waiting[1]->HasBegun(in_both));
  TESSERA_EXPECT_OK(monitor.End(absl::OkStatus()));
}

// Rank 1 is not in the group; it has announced something, and is in a
// collective, or in its own code.
TEST_F(MonitorTest, WhoIsNotInTheGroupEndsAWaitFromItsOwnCodeOnly) {
  b_->Post(b_->FailedHere(absl::InternalError("no memory")), false);
  for (bool finished : {false, true}) {
    b_->SetWaiting({3, 5, "agreement", "", finished});
    absl::Notification aborted;
    WaitMonitor monitor(a_.get(), {absl::Seconds(60), absl::Milliseconds(100)});
    auto alone = std::make_shared<WatchedGroup>(
        WatchedGroup{"alone", {0}, [&] { aborted.Notify(); }});
    monitor.Begin({1, 1, "x"}, alone);
    EXPECT_EQ(aborted.WaitForNotificationWithTimeout(absl::Milliseconds(1500)),
              finished);
    EXPECT_EQ(monitor.End(absl::OkStatus()).ok(), !finished);
  }
}

TEST(AllSaidTest, OfSomeRanks) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<Announcements>> boards;
  for (int r = 0; r < 3; ++r) {
    boards.push_back(std::move(Announcements::Create(store, r, 3)).value());
  }
  for (int r : {0, 2}) boards[r]->Post(absl::InternalError("alike"), false);
  EXPECT_TRUE(boards[0]->AllPosted(absl::ZeroDuration(), {0, 2}));
  EXPECT_FALSE(boards[0]->AllPosted(absl::ZeroDuration(), {0, 1}));
  EXPECT_FALSE(boards[0]->AllPosted(absl::ZeroDuration()));
}

// ---- what an absent rank did ----

TEST_F(MonitorTest, TimeoutSaysWhatAnAbsentRankDidLast) {
  b_->SetWaiting({6, 5, "all-gather of unit w", "all-gather, 8 bytes of int64",
                  /*finished=*/true});
  EXPECT_THAT(
      WaitUntilAborted(absl::Milliseconds(400), absl::Seconds(60)),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               AllOf(HasSubstr("rank 1 has not come (it finished all-gather of "
                               "unit w #6 (all-gather, 8 bytes of int64) and "
                               "is in its own code)"),
                     HasSubstr("rank 0 has waited in it for 4"))));
}

TEST_F(MonitorTest, ARankWhoseBeatStandsStillIsSilent) {
  b_->SetWaiting({6, 5, "all-gather of unit w"});
  EXPECT_THAT(
      WaitUntilAborted(absl::Seconds(4), absl::Seconds(60)),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               ContainsRegex("rank 1 has not come \\(last heard of "
                             "3.[0-9]*s ago, in all-gather of unit w "
                             "#6: it is stopped, or cannot be reached")));
}

TEST_F(MonitorTest, ARankThatWasNeverHeardOfAfterItsStartIsSilent) {
  EXPECT_THAT(
      WaitUntilAborted(absl::Seconds(4), absl::Seconds(60)),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               ContainsRegex("rank 1 has not come \\(last heard of "
                             "3.[0-9]*s ago, out of start-up #0 \\(before its "
                             "first collective\\): it is stopped")));
}

TEST_F(MonitorTest, ARankThatCameMayBeSilentSince) {
  b_->SetWaiting({7, 1234, "all-gather of unit x"});
  EXPECT_THAT(
      WaitUntilAborted(absl::Seconds(4), absl::Seconds(60)),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               ContainsRegex("rank 1 has come, but was last heard of 3.[0-9]*s "
                             "ago: it is stopped, or cannot be reached; rank "
                             "0 has waited in it for 4")));
}

TEST_F(MonitorTest, WhereAllHaveComeTheAwaitedRankIsNamed) {
  b_->SetWaiting({7, 1234, "all-gather of unit x"});
  EXPECT_THAT(
      WaitUntilAborted(absl::Milliseconds(200), absl::Seconds(60)),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               ContainsRegex("has not ended within 200ms: rank 0 waits for "
                             "rank 1; ranks 0, 1 have waited in it for ")));
}

TEST_F(MonitorTest, ARankPublishesWhatItIsInAndWasIn) {
  WaitMonitor monitor(b_.get(), {absl::Seconds(60), absl::Seconds(5)});
  auto until = [&](bool finished) {
    for (int i = 0; i < 500; ++i) {
      const auto at = a_->ReadSnapshot()->waiting[1];
      if (at.has_value() && at->finished == finished) return *at;
      absl::SleepFor(absl::Milliseconds(10));
    }
    return WaitingIn();
  };
  monitor.Begin({3, 9, "unit z", "broadcast"}, Both());
  EXPECT_EQ(until(false).Name(), "unit z #3 (broadcast)");
  TESSERA_EXPECT_OK(monitor.End(absl::OkStatus()));
  const WaitingIn after = until(true);
  EXPECT_EQ(after.sequence, 3);
  EXPECT_EQ(after.signature, 9u);
  EXPECT_GT(after.beat, 1);
}

// ---- what is left behind ----

std::string DumpPath(int rank) {
  return absl::StrCat(absl::StripSuffix(testing::TempDir(), "/"),
                      "/tessera-hang-rank", rank, "-pid", getpid(), ".txt");
}

TEST_F(MonitorTest, TimeoutLeavesTheLastCollectivesAndAllStacks) {
#if __has_feature(thread_sanitizer)
  GTEST_SKIP() << "a thread that waits gets signals after its wait";
#endif
  FlightRecorder ring;
  CollectiveRecord record;
  record.what = "gradient of unit q";
  ring.Enter(ring.Enqueue(record), 7);
  const absl::Status status =
      WaitUntilAborted(absl::Milliseconds(200), absl::Seconds(60));
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kDeadlineExceeded,
                               HasSubstr(DumpPath(0))));
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

TEST_F(MonitorTest, NothingIsLeftIfSwitchedOff) {
  unlink(DumpPath(0).c_str());
  SetHangDumpFolder("off");
  EXPECT_THAT(
      WaitUntilAborted(absl::Milliseconds(200), absl::Seconds(60)),
      StatusIs(absl::StatusCode::kDeadlineExceeded, Not(HasSubstr("stacks"))));
  EXPECT_NE(access(DumpPath(0).c_str(), F_OK), 0);
}

// Rank 1 never waits; the others gave up because of it.
TEST_F(MonitorTest, ARankThatIsGivenUpLeavesItsStacksToo) {
  unlink(DumpPath(1).c_str());
  WaitMonitor monitor(b_.get(), {absl::Seconds(60), absl::Seconds(5)});
  monitor.Begin({1, 1, "x"}, Both());
  TESSERA_EXPECT_OK(monitor.End(absl::OkStatus()));
  a_->Post(absl::DeadlineExceededError("rank 1 has not come"), true);
  std::string dump;
  for (int i = 0; i < 1000 && dump.empty(); ++i) {
    absl::SleepFor(absl::Milliseconds(10));
    dump = ReadWholeFile(DumpPath(1)).value_or("");
  }
  EXPECT_THAT(dump, AllOf(HasSubstr("rank 1 has not come"),
                          HasSubstr("ARankThatIsGivenUpLeaves")));
}

// ---- a backend that cannot abort ----

using MonitorDeathTest = MonitorTest;

TEST_F(MonitorDeathTest, AWaitThatCannotBeEndedEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        WaitMonitor monitor(a_.get(),
                            {absl::Milliseconds(200), absl::Seconds(60),
                             /*abort_grace=*/absl::Milliseconds(300)});
        monitor.Begin({7, 1234, "all-gather of unit x"}, Both());
        absl::SleepFor(absl::Seconds(30));
      },
      testing::ExitedWithCode(1),
      "all-gather of unit x #7 has not ended within 200ms: .*rank 1 has not "
      "come.*the wait cannot be ended \\(300ms have passed\\), so this process "
      "ends");
}

// ---- a store that does not answer ----

// Blocks while it is told to.
class FrozenStore : public c10d::HashStore {
 public:
  explicit FrozenStore(std::shared_ptr<absl::Mutex> frozen)
      : frozen_(std::move(frozen)) {}
  std::vector<std::vector<uint8_t>> multiGet(
      const std::vector<std::string>& keys) override {
    absl::MutexLock lock(frozen_.get());
    return c10d::HashStore::multiGet(keys);
  }

 private:
  const std::shared_ptr<absl::Mutex> frozen_;
};

TEST(BoundedStoreTest, IsSilentWhileTheStoreIsAndRecovers) {
  auto frozen = std::make_shared<absl::Mutex>();
  BoundedStore store(c10::make_intrusive<FrozenStore>(frozen),
                     absl::Milliseconds(100));
  ASSERT_TRUE(store.Set("a", "1"));
  EXPECT_EQ(store.Get({"a", "a"}), std::vector<std::string>({"1", "1"}));
  frozen->Lock();
  EXPECT_EQ(store.Get({"a"}), std::nullopt);
  EXPECT_TRUE(store.silent());
  const absl::Time begin = absl::Now();
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(store.Get({"a"}), std::nullopt);
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));  // not 1000 * 100 ms
  EXPECT_FALSE(store.Set("a", "2"));                  // queued
  frozen->Unlock();
  for (int i = 0; i < 500 && store.silent(); ++i) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(store.Get({"a"}), std::vector<std::string>({"2"}));
}

TEST(BoundedStoreTest, EndsThoughTheStoreDoesNot) {
  auto frozen = std::make_shared<absl::Mutex>();
  frozen->Lock();
  {
    BoundedStore store(c10::make_intrusive<FrozenStore>(frozen),
                       absl::Milliseconds(50));
    EXPECT_EQ(store.Get({"a"}), std::nullopt);
  }
  frozen->Unlock();
}

TEST(SilentStoreTest, TheTimeoutComesAllTheSame) {
  SetHangDumpFolder("off");
  auto frozen = std::make_shared<absl::Mutex>();
  c10::intrusive_ptr<c10d::Store> store =
      c10::make_intrusive<FrozenStore>(frozen);
  auto a = std::move(Announcements::Create(store, 0, 2)).value();
  auto b = std::move(Announcements::Create(store, 1, 2)).value();
  absl::Notification aborted;
  {
    WaitMonitor monitor(a.get(), {absl::Seconds(2), absl::Seconds(60)});
    monitor.Begin({7, 1234, "all-gather of unit x"},
                  Both([&] { aborted.Notify(); }));
    monitor.SetAwaited(1);
    frozen->Lock();
    const absl::Time begin = absl::Now();
    aborted.WaitForNotification();
    EXPECT_LT(absl::Now() - begin, absl::Seconds(8));
    EXPECT_THAT(
        monitor.End(absl::CancelledError("aborted")),
        StatusIs(absl::StatusCode::kDeadlineExceeded,
                 HasSubstr("bytes of rank 1 are missing; the store does "
                           "not answer")));
  }
  frozen->Unlock();
}

// ---- the liveness ----

TEST_F(BoardTest, AllSaidDoesNotWaitForARankThatHasEnded) {
  b_ = nullptr;
  ASSERT_TRUE(a_->liveness().WaitForEnd(absl::Seconds(20)));
  a_->Post(absl::InternalError("a"), false);
  const absl::Time begin = absl::Now();
  EXPECT_FALSE(a_->AllPosted(absl::Seconds(60)));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
}

TEST_F(BoardTest, ARankThatLeavesSaysSo) {
  EXPECT_TRUE(b_->liveness().Rank0Answers(absl::Seconds(20)));
  EXPECT_FALSE(a_->liveness().WaitForEnd(absl::Milliseconds(50)));
  b_ = nullptr;
  ASSERT_TRUE(a_->liveness().WaitForEnd(absl::Seconds(20)));
  ASSERT_THAT(a_->liveness().Ended(), SizeIs(1));
  EXPECT_EQ(a_->liveness().Ended()[0].rank, 1);
  EXPECT_TRUE(a_->liveness().Ended()[0].left);
}

TEST_F(BoardTest, TheOthersHearOfItThroughRank0) {
  store_ = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<Announcements>> boards;
  for (int r = 0; r < 4; ++r) {
    boards.push_back(std::move(Announcements::Create(store_, r, 4)).value());
  }
  boards[2] = nullptr;
  ASSERT_TRUE(boards[3]->liveness().WaitForEnd(absl::Seconds(20)));
  EXPECT_EQ(boards[3]->liveness().Ended()[0].rank, 2);
  boards[0] = nullptr;
  for (int i = 0; i < 1000 && boards[1]->liveness().Ended().size() < 2; ++i) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  ASSERT_THAT(boards[1]->liveness().Ended(), SizeIs(2));
  EXPECT_EQ(boards[1]->liveness().Ended()[1].rank, 0);
  EXPECT_TRUE(boards[1]->liveness().Ended()[1].left);
}

TEST_F(MonitorTest, ARankThatLeftDoesNotEndAWait) {
  b_ = nullptr;
  ASSERT_TRUE(a_->liveness().WaitForEnd(absl::Seconds(20)));
  EXPECT_THAT(WaitUntilAborted(absl::Seconds(1), absl::Milliseconds(100)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("rank 1 has not come (it has ended)")));
}

TEST_F(MonitorTest, SoAreDifferentSizesOfOneCollective) {
  b_->SetWaiting(
      {7, 99, "all-gather of unit x", "all-gather, 128 bytes of float32"});
  EXPECT_THAT(WaitUntilAborted(absl::Seconds(600), absl::Seconds(300)),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("#7 (all-gather, 64 bytes"),
                             HasSubstr("#7 (all-gather, 128 bytes"))));
  // The others read the same words, whoever saw it first.
  ASSERT_THAT(b_->Read(), SizeIs(1));
  EXPECT_EQ(b_->Read()[0].status.code(), absl::StatusCode::kFailedPrecondition);
}

// Here the two are in different collectives because rank 1 has failed.
TEST_F(MonitorTest, WhatARankAnnouncedComesBeforeTheDifference) {
  b_->SetWaiting({7, 99, "agreement"});
  b_->Post(b_->FailedHere(absl::InternalError("no memory")), false);
  EXPECT_THAT(
      WaitUntilAborted(absl::Seconds(60), absl::Milliseconds(300)),
      StatusIs(absl::StatusCode::kUnavailable, "rank 1 failed: no memory"));
}

TEST_F(MonitorTest, AnAnnouncementEndsTheWaitAfterTheGrace) {
  b_->Post(b_->FailedHere(absl::InternalError("no memory")), false);
  const absl::Time begin = absl::Now();
  EXPECT_THAT(
      WaitUntilAborted(absl::Seconds(60), absl::Milliseconds(300)),
      StatusIs(absl::StatusCode::kUnavailable, "rank 1 failed: no memory"));
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(300));
}

TEST_F(MonitorTest, AFinalAnnouncementNeedsNoGrace) {
  b_->Post(absl::UnavailableError("rank 9 failed: far"), true);
  EXPECT_THAT(WaitUntilAborted(absl::Seconds(600), absl::Seconds(2)),
              StatusIs(absl::StatusCode::kUnavailable, "rank 9 failed: far"));
}

TEST_F(MonitorTest, WhatWasTakenBackIsNeverSeen) {
  b_->Post(b_->FailedHere(absl::InternalError("old")), false);
  b_->Retract();
  EXPECT_THAT(WaitUntilAborted(absl::Milliseconds(400), absl::Milliseconds(50)),
              StatusIs(absl::StatusCode::kDeadlineExceeded));
}

TEST_F(MonitorTest, AnOwnErrorIsToldToTheOthersAsThisRanks) {
  WaitMonitor monitor(a_.get(), {absl::Seconds(60), absl::Seconds(5)});
  monitor.Begin({1, 1, "x"}, Both());
  EXPECT_THAT(monitor.End(absl::ResourceExhaustedError("no memory")),
              StatusIs(absl::StatusCode::kResourceExhausted, "no memory"));
  ASSERT_THAT(b_->Read(), SizeIs(1));
  EXPECT_EQ(b_->Read()[0].status,
            absl::UnavailableError("rank 0 failed: no memory"));
}

}  // namespace
}  // namespace tessera
