// When pulls are given up, and what is told then: on a clock that is moved by
// hand. (The rules that collectives share: comm/watch/wait_judge_test.cc.)
#include "comm/serve/shard_watch.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "comm/record/hang_dump.h"
#include "comm/serve/shard_streams.h"
#include "comm/watch/announcements.h"
#include "comm/watch/manual_clock_testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::Le;
using ::testing::Not;

constexpr absl::Duration kTimeout = absl::Minutes(1);
constexpr absl::Duration kGrace = absl::Seconds(5);

// Rank 0 of three waits.
class ShardWatchTest : public testing::Test {
 protected:
  ShardWatchTest() {
    SetHangDumpFolder("off");
    for (int r = 0; r < 3; ++r) {
      ranks_.push_back(
          std::move(Announcements::Create(store_, r, 3,
                                          /*same_host=*/true, clock_.AsClock()))
              .value());
    }
    GroupOptions options;
    options.world_size = 3;
    options.collective_timeout = kTimeout;
    options.announce_grace = kGrace;
    domain_ = std::make_shared<FailureDomain>(options, std::move(ranks_[0]));
    watch_ = std::make_unique<ShardWatch>(options, domain_);
  }

  AwaitedShard Shard() const { return {"unit s #1", 4, 9, clock_.Now(), {}}; }
  // Asks at every tick until it is to end, for `limit` at most.
  absl::Status Ask(const ShardWatch::Awaited& awaited,
                   absl::Duration limit = absl::Minutes(5)) {
    const absl::Duration begin = clock_.Now();
    absl::Status status;
    while (status.ok() && clock_.Now() - begin < limit) {
      clock_.Advance(watch_->tick());
      status = watch_->Judge(awaited);
    }
    after_ = clock_.Now() - begin;
    return status;
  }

  ManualClock clock_;
  c10::intrusive_ptr<c10d::Store> store_ =
      c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<Announcements>> ranks_;
  std::shared_ptr<FailureDomain> domain_;
  std::unique_ptr<ShardWatch> watch_;
  absl::Duration after_;
};

TEST_F(ShardWatchTest, ATimeoutNamesTheRanksWhoseShardsAreMissing) {
  ranks_[2]->SetWaiting({6, 5, "all-gather of unit w"});
  const AwaitedShard early = Shard();
  TESSERA_EXPECT_OK(Ask({{}, {}, early}, absl::Seconds(30)));
  EXPECT_THAT(
      Ask({{}, Shard(), early}),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               AllOf(HasSubstr("unit s #1 has not ended within 1m: rank 2 has "
                               "not sent its shard 4 of version 9 (last heard "
                               "of "),
                     HasSubstr(" ago, in all-gather of unit w #6: it is "
                               "stopped, or cannot be reached)"),
                     Not(HasSubstr("rank 1")))));
  EXPECT_EQ(after_, absl::Seconds(30));
}

TEST_F(ShardWatchTest, ATimeoutOfAMessageNamesItsKeyAndNoVersion) {
  AwaitedShard message = Shard();
  message.version = ShardRequest::kPosted;
  EXPECT_THAT(Ask({{}, {}, message}),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("rank 2 has not sent its message 4 (")));
}

TEST_F(ShardWatchTest, ATimeoutOfTheOwnPartSaysSo) {
  EXPECT_THAT(Ask({Shard(), {}, {}}),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("within 1m: this rank, 0, has itself no shard "
                                 "4 of version 9")));
}

TEST_F(ShardWatchTest, NothingIsWaitedForForEver) {
  TESSERA_EXPECT_OK(Ask({{}, {}, {}}));
}

TEST_F(ShardWatchTest, AnAnnouncementEndsPullsAfterTheGrace) {
  ranks_[1]->Post(absl::UnavailableError("rank 1 failed: bad sector"), false);
  EXPECT_THAT(Ask({{}, {}, Shard()}), StatusIs(absl::StatusCode::kUnavailable,
                                               "rank 1 failed: bad sector"));
  EXPECT_THAT(after_, AllOf(Ge(kGrace), Le(kGrace + absl::Milliseconds(400))));
}

TEST_F(ShardWatchTest, AFailureOfTheDomainEndsPullsAtOnce) {
  domain_->failure()->Set(absl::UnavailableError("the cable"));
  EXPECT_EQ(watch_->Judge({{}, {}, Shard()}),
            absl::UnavailableError("the cable"));
}

TEST_F(ShardWatchTest, AClosedConnectionEndsPullsThatNeedIt) {
  const AwaitedShard shard = Shard();
  TESSERA_EXPECT_OK(Ask({{}, {}, shard}, absl::Seconds(10)));
  AwaitedShard closed = shard;
  closed.closed = clock_.Now();
  EXPECT_EQ(
      Ask({{}, shard, closed}),
      absl::UnavailableError("unit s #1: rank 2 no longer serves its "
                             "shards; look at that rank's own last lines"));
  EXPECT_EQ(after_, absl::Milliseconds(300));
  // One that begins when it was closed long ago waits as long for the reason.
  closed.begin = clock_.Now();
  ranks_[2]->Post(absl::UnavailableError("rank 2 failed: disk full"), false);
  EXPECT_EQ(Ask({{}, {}, closed}),
            absl::UnavailableError("rank 2 failed: disk full"));
  EXPECT_EQ(after_, absl::Milliseconds(300));
}

}  // namespace
}  // namespace tessera
