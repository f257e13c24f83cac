// What ranks see when one of them ends, hangs, or announces that it failed.
#include <signal.h>

#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/rank_pool.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr absl::StatusCode kUnavailable = absl::StatusCode::kUnavailable;
constexpr absl::StatusCode kDeadline = absl::StatusCode::kDeadlineExceeded;

absl::Status AllReduce(const World& world, int64_t numel, const char* what) {
  at::Tensor t = torch::ones({numel});
  return world.communicator()->AllReduceSum(t, {what}).Wait();
}

RankPoolOptions ShortPatience(int world_size) {
  RankPoolOptions options;
  options.world_size = world_size;
  options.announce_grace = absl::Milliseconds(300);
  return options;
}

// ---- a rank ends ----

// The others are in the middle of something large. Args: "exit", "kill", or
// "error", an orderly end of that rank's program with its own error.
TESSERA_RANK_FUNCTION(LastRankEnds) {
  TESSERA_RETURN_IF_ERROR(AllReduce(world, 1000, "warm-up"));
  if (world.rank() == world.world_size() - 1) {
    if (args == "exit") _exit(3);
    if (args == "kill") raise(SIGKILL);
    world.communicator()->Announce(absl::DataLossError("bad sector"));
    _exit(1);
  }
  const absl::Status first = AllReduce(world, 8 << 20, "reduce of unit b.1");
  const absl::Status second = AllReduce(world, 10, "after");
  if (first != second) return absl::InternalError("another status afterwards");
  if (world.communicator()->Barrier("end") != first) {
    return absl::InternalError("another status at the barrier");
  }
  return first;
}

class RankEndsTest : public testing::TestWithParam<int> {};

TEST_P(RankEndsTest, TheOthersSayWhoAndWhere) {
  const int w = GetParam();
  for (const char* how : {"exit", "kill"}) {
    RankPool pool(ShortPatience(w));
    const absl::Time begin = absl::Now();
    const RankPool::Answers answers = pool.Run("LastRankEnds", how);
    EXPECT_LT(absl::Now() - begin, absl::Seconds(30));
    for (int r = 0; r + 1 < w; ++r) {
      EXPECT_THAT(
          answers[r],
          StatusIs(kUnavailable,
                   AllOf(HasSubstr("reduce of unit b.1: rank "),
                         HasSubstr("has ended or cannot be reached (gloo: "),
                         Not(HasSubstr("\n")), Not(HasSubstr(".cc:")))));
    }
    EXPECT_THAT(answers[0], StatusIs(kUnavailable,
                                     HasSubstr(absl::StrCat("rank ", w - 1))));
    EXPECT_THAT(answers[w - 1], StatusIs(kUnavailable));
  }
}

TEST_P(RankEndsTest, ItsOwnWordsAreHeardIfItLeftAny) {
  const int w = GetParam();
  RankPool pool(ShortPatience(w));
  const RankPool::Answers answers = pool.Run("LastRankEnds", "error");
  for (int r = 0; r + 1 < w; ++r) {
    EXPECT_THAT(answers[r],
                StatusIs(kUnavailable,
                         absl::StrCat("rank ", w - 1, " failed: bad sector")));
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, RankEndsTest, testing::Values(2, 3, 4),
                         [](const testing::TestParamInfo<int>& info) {
                           return absl::StrCat("World", info.param);
                         });

// ---- a rank does not come ----

TESSERA_RANK_FUNCTION(Rank1StaysAway) {
  if (world.rank() == 1) {
    absl::SleepFor(absl::Seconds(30));
    return "late";
  }
  return AllReduce(world, 100, "reduce of unit c.2");
}

TEST(HangTest, EndsByItsTimeoutAndNamesTheCollective) {
  RankPoolOptions options = ShortPatience(3);
  options.collective_timeout = absl::Seconds(2);
  RankPool pool(options);
  // Starts the ranks, so that the times below are those of the hang.
  EXPECT_THAT(pool.Run("NoSuch", ""),
              Each(StatusIs(absl::StatusCode::kNotFound)));
  const absl::Time begin = absl::Now();
  const RankPool::Answers answers =
      pool.Run("Rank1StaysAway", "", absl::Seconds(8));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(12));
  EXPECT_THAT(answers[0],
              StatusIs(kDeadline, AllOf(HasSubstr("reduce of unit c.2 #"),
                                        HasSubstr("within 2s"),
                                        HasSubstr("rank 2 waits here too"),
                                        Not(HasSubstr("rank 1")))));
  // Whichever timed out first told the other.
  EXPECT_THAT(answers[2], StatusIs(kDeadline, HasSubstr("unit c.2 #")));
}

TESSERA_RANK_FUNCTION(DifferentCollectives) {
  at::Tensor t = torch::ones({2});
  if (world.rank() == 1) {
    return world.communicator()->Broadcast(t, 0, {"broadcast of w"}).Wait();
  }
  return world.communicator()->AllReduceSum(t, {"reduce of v"}).Wait();
}

TESSERA_RANK_FUNCTION(DifferentSizes) {
  return AllReduce(world, 1000 + 1000 * world.rank(), "reduce of v");
}

TESSERA_RANK_FUNCTION(DifferentPurposes) {
  return AllReduce(world, 1000, world.rank() == 0 ? "unit a" : "unit b");
}

// Told by the rank itself (FailedPrecondition), or by the one that saw it first
// and gave up (Unavailable, "rank 1 failed: ..."): the words are the same.
TEST(HangTest, RanksInDifferentCollectivesAreTold) {
  RankPoolOptions options = ShortPatience(2);
  options.collective_timeout = absl::Seconds(2);
  RankPool pool(options);
  const std::vector<std::pair<const char*, std::vector<const char*>>> cases = {
      {"DifferentCollectives", {"in broadcast of w #", "in reduce of v #"}},
      {"DifferentSizes", {"in reduce of v #", "with another size or dtype"}},
      {"DifferentPurposes", {"in unit a #", "in unit b #"}}};
  for (const auto& [function, names] : cases) {
    for (const auto& answer : pool.Run(function, "")) {
      EXPECT_THAT(answer.status().message(),
                  AllOf(HasSubstr("the ranks are in different collectives"),
                        HasSubstr(names[0]), HasSubstr(names[1])));
    }
  }
}

// ---- announcements ----

// Rank 1 fails where it cannot come to an agreement, and lives on.
TESSERA_RANK_FUNCTION(Rank1Announces) {
  TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("before"));
  if (world.rank() == 1) {
    world.communicator()->Announce(
        absl::ResourceExhaustedError("unit d.3: out of memory"));
    // Its own next collective fails too: the others have given up.
    return AllReduce(world, 10, "agreement of rank 1");
  }
  return AllReduce(world, 1 << 20, "reduce of unit d.3");
}

TEST(AnnounceTest, EndsTheWaitOfTheOthers) {
  for (int w : {2, 3}) {
    RankPool pool(ShortPatience(w));
    const absl::Time begin = absl::Now();
    const RankPool::Answers answers = pool.Run("Rank1Announces", "");
    EXPECT_LT(absl::Now() - begin, absl::Seconds(30));
    for (int r = 0; r < w; ++r) {
      EXPECT_THAT(
          answers[r],
          StatusIs(kUnavailable, "rank 1 failed: unit d.3: out of memory"));
    }
  }
}

// Rank 1 announces and is at the agreement soon: nobody's wait is ended, even
// by announcements that stood for long and were taken back.
TESSERA_RANK_FUNCTION(AnnounceAndAgree) {
  Communicator& comm = *world.communicator();
  for (int round = 0; round < 3; ++round) {
    absl::Status mine;
    if (world.rank() == 1) {
      mine = absl::OutOfRangeError(absl::StrCat("round ", round));
      comm.Announce(mine);
    }
    const absl::Status agreed = comm.AgreeOk(mine, "forward");
    if (agreed.message() != absl::StrCat("[forward] rank 1: round ", round)) {
      return agreed;
    }
    if (world.rank() == 1) comm.ClearAnnouncement();
    // Long waits for rank 0, with nothing announced.
    if (world.rank() == 0) absl::SleepFor(absl::Milliseconds(700));
    TESSERA_RETURN_IF_ERROR(comm.Barrier("after"));
  }
  return "ok";
}

TEST(AnnounceTest, AgreedAndClearedIsForgotten) {
  RankPool pool(ShortPatience(3));
  EXPECT_THAT(pool.Run("AnnounceAndAgree", ""), Each(IsOkAndHolds("ok")));
}

// The last rank is very late; rank 1's announcement stands all the time, but
// rank 1 is in the agreement too, so the others wait on.
TESSERA_RANK_FUNCTION(LateAgreement) {
  Communicator& comm = *world.communicator();
  absl::Status mine;
  if (world.rank() == 1) {
    mine = absl::OutOfRangeError("mine");
    comm.Announce(mine);
    absl::SleepFor(absl::Milliseconds(50));
  }
  if (world.rank() == 2) absl::SleepFor(absl::Seconds(3));
  const absl::Status agreed = comm.AgreeOk(mine, "forward");
  if (world.rank() == 1) comm.ClearAnnouncement();
  TESSERA_RETURN_IF_ERROR(comm.Barrier("after"));
  return agreed.ToString();
}

TEST(AnnounceTest, DoesNotEndAnAgreementThatTheAnnouncerIsIn) {
  RankPool pool(ShortPatience(3));
  EXPECT_THAT(pool.Run("LateAgreement", ""),
              Each(IsOkAndHolds("OUT_OF_RANGE: [forward] rank 1: mine")));
}

TESSERA_RANK_FUNCTION(AllAnnounce) {
  Communicator& comm = *world.communicator();
  for (int round = 0; round < 20; ++round) {
    comm.Announce(absl::InternalError("alike"));
    if (!comm.AllAnnounced(absl::Seconds(20))) return "not all";
    comm.ClearAnnouncement();
    TESSERA_RETURN_IF_ERROR(comm.Barrier("between"));
  }
  TESSERA_RETURN_IF_ERROR(comm.Barrier("last"));
  if (world.rank() == 0) return "all";
  comm.Announce(absl::InternalError("rank 0 does not"));
  const bool all = comm.AllAnnounced(absl::Milliseconds(100));
  comm.ClearAnnouncement();
  return all ? "wrongly all" : "all";
}

TEST(AnnounceTest, AllAnnounced) {
  for (int w : {2, 3}) {
    EXPECT_THAT(RankPool::Get(w)->Run("AllAnnounce", ""),
                Each(IsOkAndHolds("all")));
  }
}

// A failed communicator's words reach ranks that did not see the cause: rank 2
// announces, only rank 0 waits for it at first.
TESSERA_RANK_FUNCTION(WordsSpread) {
  Communicator& comm = *world.communicator();
  TESSERA_RETURN_IF_ERROR(comm.Barrier("before"));
  if (world.rank() == 2) {
    comm.Announce(absl::InternalError("the cause"));
    absl::SleepFor(absl::Seconds(2));
    comm.ClearAnnouncement();
    return "left";
  }
  if (world.rank() == 1) absl::SleepFor(absl::Seconds(4));
  return AllReduce(world, 10, "reduce");
}

TEST(AnnounceTest, TheFirstWordsReachTheRanksThatComeLater) {
  RankPool pool(ShortPatience(3));
  const RankPool::Answers answers = pool.Run("WordsSpread", "");
  EXPECT_THAT(answers,
              ElementsAre(StatusIs(kUnavailable, "rank 2 failed: the cause"),
                          StatusIs(kUnavailable, "rank 2 failed: the cause"),
                          IsOkAndHolds("left")));
}

}  // namespace
}  // namespace tessera
