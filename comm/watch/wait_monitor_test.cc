// What the monitor of waits says of a collective that does not end, and what it
// tells the others. (When a wait is to end: wait_judge_test.cc.)
#include "comm/watch/wait_monitor.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "base/thread/no_threads_test_util.h"
#include "comm/watch/announcements.h"
#include "comm/watch/watch_testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr WaitMonitor::Options kByHand = {absl::Seconds(60), absl::Seconds(5),
                                          kAbortGrace, /*on_watchdog=*/false};

TEST_F(MonitorTest, WithoutAThreadNobodyWatches) {
  const NoThreads none;
  const WaitMonitor monitor(a_.get(), {absl::Seconds(60), absl::Seconds(5)});
  EXPECT_THAT(monitor.watching(), StatusIs(absl::StatusCode::kResourceExhausted,
                                           HasSubstr("tessera-watch")));
}

TEST_F(MonitorTest, TimeoutNamesTheCollectiveAndWhoWaitsWhere) {
  b_->SetWaiting({8, 99, "reduce-scatter of unit y"});
  EXPECT_THAT(
      WaitUntilAborted(absl::Seconds(2), absl::Seconds(60)),
      StatusIs(
          absl::StatusCode::kDeadlineExceeded,
          AllOf(HasSubstr("all-gather of unit x #7 (all-gather, 64 bytes of "
                          "float32) has not ended within 2s"),
                HasSubstr("rank 1 is in reduce-scatter of unit y #8"),
                HasSubstr("rank 0 has waited in it for 2s"))));
  EXPECT_EQ(waited_, absl::Seconds(2));
  // What failed here is final for the others.
  ASSERT_THAT(b_->Read(), SizeIs(1));
  EXPECT_TRUE(b_->Read()[0].final);
}

TEST_F(MonitorTest, TheOthersReadTheSameWordsWhoeverSawItFirst) {
  b_->SetWaiting(
      {7, 99, "all-gather of unit x", "all-gather, 128 bytes of float32"});
  EXPECT_THAT(WaitUntilAborted(absl::Seconds(600), absl::Seconds(300)),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("#7 (all-gather, 64 bytes"),
                             HasSubstr("#7 (all-gather, 128 bytes"))));
  ASSERT_THAT(b_->Read(), SizeIs(1));
  EXPECT_EQ(b_->Read()[0].status.code(), absl::StatusCode::kFailedPrecondition);
}

// Rank 2 takes back what it announced after rank 0 has given up for that; rank
// 1 begins to wait later still.
TEST_F(MonitorTest, TheFirstReasonReachesTheRanksThatComeLater) {
  store_ = c10::make_intrusive<c10d::HashStore>();
  a_ = Join(0, 3);
  b_ = Join(1, 3);
  const std::unique_ptr<Announcements> c = Join(2, 3);
  const absl::Status cause = c->FailedHere(absl::InternalError("the cause"));
  c->Post(cause, /*final=*/false);
  EXPECT_EQ(WaitUntilAborted(absl::Seconds(60), absl::Seconds(5)), cause);
  EXPECT_GE(waited_, absl::Seconds(5));
  c->Retract();
  clock_.Advance(absl::Hours(1));
  std::swap(a_, b_);
  EXPECT_EQ(WaitUntilAborted(absl::Seconds(60), absl::Seconds(5)), cause);
  EXPECT_LT(waited_, absl::Seconds(1));
}

TEST_F(MonitorTest, AnOwnErrorIsToldToTheOthersAsThisRanks) {
  WaitMonitor monitor(a_.get(), kByHand);
  monitor.Begin({1, 1, "x"}, Both());
  EXPECT_THAT(monitor.End(absl::ResourceExhaustedError("no memory")),
              StatusIs(absl::StatusCode::kResourceExhausted, "no memory"));
  ASSERT_THAT(b_->Read(), SizeIs(1));
  EXPECT_EQ(b_->Read()[0].status,
            absl::UnavailableError("rank 0 failed: no memory"));
}

// The transport only knows that a connection is broken.
TEST_F(MonitorTest, ABrokenConnectionIsTheFaultOfTheRankThatEnded) {
  Vanish(1);
  WaitMonitor monitor(a_.get(), kByHand);
  monitor.Begin({1, 1, "x"}, Both());
  EXPECT_THAT(monitor.End(absl::UnavailableError("connection reset")),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("x #1: rank 1 has ended (its process is "
                                 "gone)")));
}

TEST_F(MonitorTest, AVerdictIsOfOneWait) {
  bool aborted = false;
  WaitMonitor monitor(a_.get(), kByHand);
  monitor.Begin({1, 1, "x"}, Both([&] { aborted = true; }));
  clock_.Advance(absl::Seconds(59));
  monitor.Look();
  TESSERA_EXPECT_OK(monitor.End(absl::OkStatus()));
  monitor.Begin({2, 2, "y"}, Both([&] { aborted = true; }));
  clock_.Advance(absl::Seconds(59));
  monitor.Look();
  EXPECT_FALSE(aborted);
  clock_.Advance(absl::Seconds(1));
  monitor.Look();
  EXPECT_TRUE(aborted);
  // The transport is aborted, even if this wait won the race.
  EXPECT_THAT(
      monitor.End(absl::OkStatus()),
      StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("y #2 has not")));
}

// ---- several groups ----

TEST_F(MonitorTest, ARankThatHasComeMayBeInAnotherGroupByNow) {
  WaitingIn elsewhere{2, 99, "reduce-scatter of unit y"};
  elsewhere.group = "halves 1.0";
  b_->SetWaiting(elsewhere);
  EXPECT_THAT(
      WaitUntilAborted(absl::Seconds(2), absl::Seconds(60)),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               HasSubstr("rank 1 has not come (it is in reduce-scatter of unit "
                         "y #2)")));
  b_ = Join(1, 2);
  a_ = Join(0, 2);
  elsewhere.begun = {{"", 7}, {"halves 1.0", 2}};
  b_->SetWaiting(elsewhere);
  EXPECT_THAT(WaitUntilAborted(absl::Seconds(2), absl::Seconds(60)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("within 2s: rank 1 is in reduce-scatter of "
                                 "unit y #2; rank 0 has waited")));
}

TEST_F(MonitorTest, PublishesTheLastCollectiveOfEachGroupThatIsLeft) {
  WaitMonitor monitor(b_.get(), kByHand);
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

// ---- what an absent rank did ----

TEST_F(MonitorTest, TimeoutSaysWhatAnAbsentRankDidLast) {
  b_->SetWaiting({6, 5, "all-gather of unit w", "all-gather, 8 bytes of int64",
                  /*finished=*/true});
  EXPECT_THAT(
      WaitUntilAborted(absl::Seconds(2), absl::Seconds(60)),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               AllOf(HasSubstr("rank 1 has not come (it finished all-gather of "
                               "unit w #6 (all-gather, 8 bytes of int64) and "
                               "is in its own code)"),
                     HasSubstr("rank 0 has waited in it for 2s"))));
}

TEST_F(MonitorTest, ARankWhoseBeatStandsStillIsSilent) {
  b_->SetWaiting({6, 5, "all-gather of unit w"});
  EXPECT_THAT(
      WaitUntilAborted(absl::Seconds(60), absl::Seconds(60)),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               HasSubstr("rank 1 has not come (last heard of 59s ago, in "
                         "all-gather of unit w #6: it is stopped, or cannot "
                         "be reached")));
}

TEST_F(MonitorTest, ARankThatWasNeverHeardOfAfterItsStartIsSilent) {
  EXPECT_THAT(WaitUntilAborted(absl::Seconds(4), absl::Seconds(60)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("rank 1 has not come (last heard of 3.9s ago, "
                                 "out of start-up #0 (before its first "
                                 "collective): it is stopped")));
}

TEST_F(MonitorTest, ARankThatCameMayBeSilentSince) {
  b_->SetWaiting({7, 1234, "all-gather of unit x"});
  EXPECT_THAT(WaitUntilAborted(absl::Seconds(4), absl::Seconds(60)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("rank 1 has come, but was last heard of 3.9s "
                                 "ago: it is stopped, or cannot be reached; "
                                 "rank 0 has waited in it for 4")));
}

TEST_F(MonitorTest, WhereAllHaveComeTheAwaitedRankIsNamed) {
  b_->SetWaiting({7, 1234, "all-gather of unit x"});
  EXPECT_THAT(WaitUntilAborted(absl::Seconds(2), absl::Seconds(60)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("has not ended within 2s: rank 0 waits for "
                                 "rank 1; ranks 0, 1 have waited in it for ")));
}

TEST_F(MonitorTest, ARankThatLeftIsNamedAtTheTimeout) {
  b_ = nullptr;
  ASSERT_TRUE(a_->liveness().WaitForEnd(kEnough));
  EXPECT_THAT(WaitUntilAborted(absl::Seconds(10), absl::Seconds(1)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("rank 1 has not come (it has ended)")));
  EXPECT_EQ(waited_, absl::Seconds(10));
}

TEST_F(MonitorTest, ARankPublishesWhatItIsInAndWasIn) {
  WaitMonitor monitor(b_.get(), kByHand);
  const auto read = [&] { return *a_->ReadSnapshot()->waiting[1]; };
  monitor.Look();
  const int64_t beat = read().beat;
  monitor.Begin({2, 9, "unit y"}, Both());
  monitor.Look();  // the first in a long time
  TESSERA_EXPECT_OK(monitor.End(absl::OkStatus()));
  monitor.Begin({3, 9, "unit z", "broadcast"}, Both());
  clock_.Advance(absl::Milliseconds(90));
  monitor.Look();  // it may end soon
  EXPECT_EQ(read().Name(), "unit y #2");
  clock_.Advance(absl::Milliseconds(10));
  monitor.Look();
  EXPECT_EQ(read().Name(), "unit z #3 (broadcast)");
  EXPECT_FALSE(read().finished);
  TESSERA_EXPECT_OK(monitor.End(absl::OkStatus()));
  clock_.Advance(absl::Milliseconds(900));
  monitor.Look();
  EXPECT_TRUE(read().finished);
  EXPECT_EQ(read().sequence, 3);
  EXPECT_EQ(read().signature, 9u);
  EXPECT_EQ(read().beat, beat + 3);
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

TEST_F(MonitorTest, TheTimeoutComesThoughTheStoreIsSilent) {
  auto frozen = std::make_shared<absl::Mutex>();
  store_ = c10::make_intrusive<FrozenStore>(frozen);
  a_ = Join(0, 2);
  b_ = Join(1, 2);
  frozen->Lock();
  EXPECT_THAT(WaitUntilAborted(absl::Minutes(5), absl::Seconds(60)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("bytes of rank 1 are missing; the store does "
                                 "not answer")));
  EXPECT_EQ(waited_, absl::Minutes(5));
  frozen->Unlock();
}

}  // namespace
}  // namespace tessera
