// When a wait is to be ended, and what is told then: all on a clock that is
// moved by hand.
#include "comm/watch/wait_judge.h"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "comm/watch/watch_testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::Le;
using ::testing::Not;

constexpr absl::Duration kTimeout = absl::Minutes(10);
constexpr absl::Duration kGrace = absl::Seconds(5);
// Looks are so far apart in a long wait.
constexpr absl::Duration kLooks = absl::Milliseconds(400);

class WaitJudgeTest : public WatchTest {
 protected:
  WaitJudge::Wait InCollective() const {
    return {mine_.Name(), clock_.Now(), &ranks_, &mine_};
  }
  WaitJudge::Wait ForShards() const {
    return {"unit s #3", clock_.Now(), &ranks_, nullptr};
  }
  // Asks at every tick, as who watches does, until `wait` is to end; for
  // `limit` at most. The wait's age then is in `after_`.
  absl::Status Ask(const WaitJudge::Wait& wait,
                   absl::Duration limit = absl::Minutes(5)) {
    const absl::Duration until = clock_.Now() + limit;
    absl::Status status;
    for (; clock_.Now() < until; clock_.Advance(judge_.tick())) {
      status = judge_.JudgeEnded(wait);
      if (status.ok()) status = judge_.JudgeAnnouncements(wait);
      after_ = clock_.Now() - wait.begin;
      if (!status.ok()) break;
    }
    return status;
  }
  void PostOfB(const char* message) {
    b_->Post(b_->FailedHere(absl::DataLossError(message)), /*final=*/false);
  }
  // b is in `at`, or was.
  void MoveB(WaitingIn at, bool finished = false) {
    at.finished = finished;
    b_->SetWaiting(at);
  }

  const std::vector<int> ranks_ = {0, 1};
  const WaitingIn mine_{7, 1234, "all-gather of unit x",
                        "all-gather, 64 bytes of float32"};
  WaitJudge judge_{a_.get(), {kTimeout, kGrace}};
  absl::Duration after_;
};

MATCHER_P(FailedOfB, message, "") {
  return arg ==
         absl::UnavailableError(std::string("rank 1 failed: ") + message);
}

// ---- nothing is wrong ----

TEST_F(WaitJudgeTest, AWaitGoesOnUntilItsTimeout) {
  const WaitJudge::Wait wait = InCollective();
  TESSERA_EXPECT_OK(Ask(wait, kTimeout));
  clock_.Advance(wait.begin + kTimeout - clock_.Now() - absl::Nanoseconds(1));
  EXPECT_FALSE(judge_.TimedOut(wait.begin));
  clock_.Advance(absl::Nanoseconds(1));
  EXPECT_TRUE(judge_.TimedOut(wait.begin));
  EXPECT_THAT(judge_.TooLong(wait.name, "rank 1 sleeps"),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       "all-gather of unit x #7 (all-gather, 64 bytes of "
                       "float32) has not ended within 10m: rank 1 sleeps"));
}

// All ranks ask one store.
TEST_F(WaitJudgeTest, LooksBecomeRare) {
  class CountingStore : public c10d::HashStore {
   public:
    std::vector<std::vector<uint8_t>> multiGet(
        const std::vector<std::string>& keys) override {
      ++reads;
      return c10d::HashStore::multiGet(keys);
    }
    std::atomic<int> reads{0};
  };
  const auto store = c10::make_intrusive<CountingStore>();
  store_ = store;
  a_ = Join(0, 2);
  b_ = Join(1, 2);
  WaitJudge judge(a_.get(), {kTimeout, kGrace});
  WaitJudge::Wait wait = InCollective();
  const auto reads_until = [&](absl::Duration age) {
    for (; clock_.Now() <= wait.begin + age; clock_.Advance(judge.tick())) {
      TESSERA_EXPECT_OK(judge.JudgeAnnouncements(wait));
    }
    return store->reads.exchange(0);
  };
  EXPECT_EQ(reads_until(absl::Milliseconds(50)), 0);
  EXPECT_EQ(reads_until(absl::Milliseconds(700)), 3);  // 100, 300, 700
  EXPECT_EQ(reads_until(absl::Milliseconds(700) + 100 * kLooks), 100);
  wait.begin = clock_.Now();  // the next wait begins anew
  EXPECT_EQ(reads_until(absl::Milliseconds(700)), 3);
  // Pulls that had begun when the one before them was looked at: no more looks
  // than for one of them.
  reads_until(absl::Milliseconds(700) + 3 * kLooks);
  for (int pull = 0; pull < 20; ++pull, clock_.Advance(judge.tick())) {
    wait.begin += absl::Milliseconds(1);
    TESSERA_EXPECT_OK(judge.JudgeAnnouncements(wait));
  }
  EXPECT_LE(store->reads, 20 * judge.tick() / kLooks + 1);
}

// ---- announcements ----

TEST_F(WaitJudgeTest, AnAnnouncementEndsAWaitAfterTheGrace) {
  for (bool shards : {false, true}) {
    PostOfB("bad sector");
    const WaitJudge::Wait wait = shards ? ForShards() : InCollective();
    EXPECT_THAT(Ask(wait), FailedOfB("bad sector"));
    EXPECT_THAT(after_, AllOf(Ge(kGrace), Le(kGrace + kLooks)));
  }
}

TEST_F(WaitJudgeTest, TheGraceIsCountedFromTheAnnouncement) {
  const WaitJudge::Wait wait = InCollective();
  TESSERA_EXPECT_OK(Ask(wait, absl::Minutes(1)));
  PostOfB("bad sector");
  EXPECT_THAT(Ask(wait), FailedOfB("bad sector"));
  EXPECT_THAT(after_, AllOf(Ge(absl::Minutes(1) + kGrace),
                            Le(absl::Minutes(1) + kGrace + 2 * kLooks)));
}

// It had been standing for long, but the agreement may be what begins now.
TEST_F(WaitJudgeTest, TheGraceIsCountedFromTheBeginOfTheWait) {
  PostOfB("bad sector");
  TESSERA_EXPECT_OK(Ask(InCollective(), kGrace - absl::Milliseconds(1)));
  EXPECT_THAT(Ask(InCollective()), FailedOfB("bad sector"));
  EXPECT_THAT(after_, AllOf(Ge(kGrace), Le(kGrace + kLooks)));
}

TEST_F(WaitJudgeTest, AFinalAnnouncementNeedsNoGrace) {
  b_->Post(absl::UnavailableError("rank 9 failed: far"), /*final=*/true);
  EXPECT_EQ(Ask(InCollective()), absl::UnavailableError("rank 9 failed: far"));
  EXPECT_EQ(after_, absl::Milliseconds(100));
}

TEST_F(WaitJudgeTest, WhatIsTakenBackInTimeEndsNothing) {
  for (bool shards : {false, true}) {
    const WaitJudge::Wait wait = shards ? ForShards() : InCollective();
    for (int round = 0; round < 5; ++round) {
      PostOfB("each time another one");
      TESSERA_EXPECT_OK(Ask(wait, kGrace - kLooks));
      b_->Retract();
      TESSERA_EXPECT_OK(Ask(wait, absl::Seconds(1)));
    }
    TESSERA_EXPECT_OK(Ask(wait, absl::Seconds(30)));
  }
}

// However late the last rank is; and not by what it announced for an earlier
// agreement, or for that of another group.
TEST_F(WaitJudgeTest, WhoIsInTheSameCollectiveWillTellByItself) {
  PostOfB("bad sector");
  MoveB(mine_);
  TESSERA_EXPECT_OK(Ask(InCollective()));
  WaitingIn other = mine_;
  other.group = "halves 1.0";
  for (const WaitingIn& at : {WaitingIn{8, 1234, "later"},
                              WaitingIn{7, 99, "of other ranks"}, other}) {
    MoveB(at);
    EXPECT_THAT(Ask(InCollective()), FailedOfB("bad sector")) << at.Name();
    EXPECT_THAT(after_, AllOf(Ge(kGrace), Le(kGrace + kLooks)));
  }
}

// A pull is ended by nobody's agreement.
TEST_F(WaitJudgeTest, ARankOfTheGroupEndsAWaitForShardsWhereverItIs) {
  PostOfB("bad sector");
  for (bool finished : {false, true}) {
    MoveB(mine_, finished);
    EXPECT_THAT(Ask(ForShards()), FailedOfB("bad sector"));
  }
}

TEST_F(WaitJudgeTest, WhoIsNotInTheGroupEndsAWaitFromItsOwnCodeOnly) {
  PostOfB("no memory");
  const std::vector<int> alone = {0};
  for (bool shards : {false, true}) {
    WaitJudge::Wait wait = shards ? ForShards() : InCollective();
    wait.ranks = &alone;
    MoveB({3, 5, "agreement"});
    TESSERA_EXPECT_OK(Ask(wait));
    MoveB({3, 5, "agreement"}, /*finished=*/true);
    wait.begin = clock_.Now();
    EXPECT_THAT(Ask(wait), FailedOfB("no memory"));
    EXPECT_THAT(after_, AllOf(Ge(kGrace), Le(kGrace + kLooks)));
  }
}

// ---- different collectives ----

TEST_F(WaitJudgeTest, DifferentCollectivesOfOneNumberAreNamedAtOnce) {
  MoveB({7, 99, "reduction of gradients of unit y",
         "reduce-scatter sum, 8 bytes of float64"});
  EXPECT_THAT(
      Ask(InCollective()),
      StatusIs(
          absl::StatusCode::kFailedPrecondition,
          AllOf(HasSubstr(
                    "the ranks are in different collectives: rank 0 "
                    "in all-gather of unit x #7 (all-gather, 64 "
                    "bytes of float32), rank 1 in reduction of "
                    "gradients of unit y #7 (reduce-scatter sum, 8 bytes of "
                    "float64)"),
                HasSubstr("as many batches: see Engine::AnyRankHasData"))));
  EXPECT_EQ(after_, absl::Milliseconds(100));
  TESSERA_EXPECT_OK(Ask(ForShards()));  // which is in no collective
}

// Not of batches: rank 1 makes a call alone.
TEST_F(WaitJudgeTest, ACallThatOneRankMakesAloneIsNoMatterOfBatches) {
  MoveB({7, 99, "SetLearningRate", "agreement"});
  EXPECT_THAT(Ask(InCollective()),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("rank 1 in SetLearningRate #7"),
                             HasSubstr("look for one that a rank makes alone"),
                             Not(HasSubstr("AnyRankHasData")))));
}

// Rank 0 has waited for long, and looks rarely by now.
TEST_F(WaitJudgeTest, ARankThatComesLateToAnotherCollectiveIsNoticedSoon) {
  const WaitJudge::Wait wait = InCollective();
  TESSERA_EXPECT_OK(Ask(wait, absl::Minutes(2)));
  MoveB({7, 99, "reduce-scatter of unit y"});
  EXPECT_THAT(Ask(wait), StatusIs(absl::StatusCode::kFailedPrecondition));
  EXPECT_LE(after_, absl::Minutes(2) + kLooks);
}

TEST_F(WaitJudgeTest, EqualNumbersOfTwoGroupsAreNoMismatch) {
  WaitingIn elsewhere{7, 99, "reduce-scatter of unit y"};
  elsewhere.group = "halves 1.0";
  MoveB(elsewhere);
  TESSERA_EXPECT_OK(Ask(InCollective()));
}

// Here the two are in different collectives because one of them has failed.
TEST_F(WaitJudgeTest, WhatARankAnnouncedComesBeforeTheDifference) {
  MoveB({7, 99, "agreement"});
  PostOfB("no memory");
  EXPECT_THAT(Ask(InCollective()), FailedOfB("no memory"));
  b_->Retract();
  a_->Post(absl::InternalError("own"), false);
  TESSERA_EXPECT_OK(Ask(InCollective()));
}

// ---- ranks that have ended ----

TEST_F(WaitJudgeTest, AProcessThatIsGoneEndsAWait) {
  const WaitJudge::Wait wait = InCollective();
  TESSERA_EXPECT_OK(Ask(wait, absl::Seconds(50)));
  Vanish(1);
  EXPECT_THAT(Ask(wait),
              StatusIs(absl::StatusCode::kUnavailable,
                       "all-gather of unit x #7 (all-gather, 64 bytes of "
                       "float32): rank 1 has ended (its process is gone); look "
                       "at that rank's own last lines"));
  EXPECT_EQ(after_, absl::Seconds(50) + absl::Milliseconds(300));
  // What had come from it may still end a wait that begins now.
  EXPECT_THAT(Ask(ForShards()), StatusIs(absl::StatusCode::kUnavailable,
                                         HasSubstr("unit s #3: rank 1 has")));
  EXPECT_EQ(after_, absl::Milliseconds(300));
}

TEST_F(WaitJudgeTest, WhatItAnnouncedBeforeItEndedSaysMore) {
  PostOfB("bad sector");
  Vanish(1);
  EXPECT_THAT(Ask(InCollective()), FailedOfB("bad sector"));
  EXPECT_EQ(after_, absl::Milliseconds(300));
}

// It has done its part of all that it took part in.
TEST_F(WaitJudgeTest, ARankThatLeftDoesNotEndAWait) {
  b_ = nullptr;
  ASSERT_TRUE(a_->liveness().WaitForEnd(kEnough));
  TESSERA_EXPECT_OK(Ask(InCollective()));
}

}  // namespace
}  // namespace tessera
