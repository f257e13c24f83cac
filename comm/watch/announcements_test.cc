// What ranks tell each other through the store.
#include "comm/watch/announcements.h"

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/barrier.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "comm/watch/watch_testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

using AnnouncementsTest = WatchTest;

TEST_F(AnnouncementsTest, ArePostedAndRetracted) {
  EXPECT_THAT(a_->Read(), IsEmpty());
  b_->Retract();  // nothing to take back
  EXPECT_THAT(a_->Read(), IsEmpty());
  b_->Post(b_->FailedHere(absl::DataLossError("file gone, twice")), false);
  std::vector<Announcement> posted = a_->Read();
  ASSERT_THAT(posted, SizeIs(1));
  EXPECT_EQ(posted[0].rank, 1);
  EXPECT_EQ(posted[0].count, 1);
  EXPECT_FALSE(posted[0].final);
  EXPECT_EQ(posted[0].status,
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

TEST_F(AnnouncementsTest, AllPosted) {
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

TEST_F(AnnouncementsTest, AllPostedOfSomeRanks) {
  store_ = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<Announcements>> ranks;
  for (int r = 0; r < 3; ++r) ranks.push_back(Join(r, 3));
  for (int r : {0, 2}) ranks[r]->Post(absl::InternalError("the same"), false);
  EXPECT_TRUE(ranks[0]->AllPosted(absl::ZeroDuration(), {0, 2}));
  EXPECT_FALSE(ranks[0]->AllPosted(absl::ZeroDuration(), {0, 1}));
  EXPECT_FALSE(ranks[0]->AllPosted(absl::ZeroDuration()));
}

// All see it, round after round, whoever posts and retracts first.
TEST_F(AnnouncementsTest, AllPostedOfRanksThatPostAtOnce) {
  constexpr int kRanks = 3, kRounds = 200;
  store_ = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<Announcements>> ranks;
  for (int r = 0; r < kRanks; ++r) ranks.push_back(Join(r, kRanks));
  std::vector<absl::Barrier*> rounds;
  for (int i = 0; i < kRounds; ++i) rounds.push_back(new absl::Barrier(kRanks));
  std::vector<int> seen(kRanks, 0);
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      for (absl::Barrier* const round : rounds) {
        ranks[r]->Post(absl::InternalError("the same"), false);
        seen[r] += ranks[r]->AllPosted(kEnough);
        ranks[r]->Retract();
        if (round->Block()) delete round;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(seen, testing::Each(kRounds));
}

TEST_F(AnnouncementsTest, AllPostedDoesNotWaitForARankThatHasEnded) {
  b_ = nullptr;
  ASSERT_TRUE(a_->liveness().WaitForEnd(kEnough));
  a_->Post(absl::InternalError("a"), false);
  const absl::Time begin = absl::Now();
  EXPECT_FALSE(a_->AllPosted(absl::Seconds(60)));
  EXPECT_LT(absl::Now() - begin, kEnough);
}

}  // namespace
}  // namespace tessera
