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
#include "tests/support/rank_pool.h"
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
      // Not a rank that ended because of it.
      EXPECT_THAT(
          answers[r],
          StatusIs(
              kUnavailable,
              AllOf(HasSubstr("reduce of unit b.1"),
                    HasSubstr(absl::StrCat(": rank ", w - 1, " has ended")),
                    Not(HasSubstr("\n")), Not(HasSubstr(".cc:")))));
    }
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

// Rank 2 is killed; rank 1 waits for a broadcast of rank 0, which is in its own
// code: no message of rank 1's has anything to do with rank 2.
TESSERA_RANK_FUNCTION(KilledFarAway) {
  TESSERA_RETURN_IF_ERROR(AllReduce(world, 1000, "warm-up"));
  if (world.rank() == 2) raise(SIGKILL);
  if (world.rank() == 0) absl::SleepFor(absl::Seconds(6));
  at::Tensor t = torch::ones({10});
  const absl::Time begin = absl::Now();
  const absl::Status status =
      world.communicator()->Broadcast(t, 0, {"broadcast of w"}).Wait();
  const absl::Duration waited = absl::Now() - begin;
  if (waited > absl::Seconds(2)) {
    return absl::InternalError(absl::StrCat(
        "waited ", absl::FormatDuration(waited), ": ", status.message()));
  }
  return status;
}

TEST(FarRankEndsTest, IsNoticedByRanksThatHaveNoMessageWithIt) {
  RankPool pool(ShortPatience(3));
  const RankPool::Answers answers = pool.Run("KilledFarAway", "");
  for (int r : {0, 1}) {
    EXPECT_THAT(answers[r],
                StatusIs(kUnavailable, HasSubstr("rank 2 has ended")));
  }
}

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
  // Whichever timed out first told the other.
  for (int r : {0, 2}) {
    EXPECT_THAT(
        answers[r],
        StatusIs(kDeadline,
                 AllOf(HasSubstr("reduce of unit c.2 #2 (all-reduce sum, 400 "
                                 "bytes of float32) has not ended within 2s"),
                       HasSubstr("rank 1 has not come (it finished start-up "
                                 "#1 (agreement) and is in its own code)"),
                       HasSubstr("ranks 0, 2 have waited in it for "),
                       HasSubstr(absl::StrCat("tessera-hang-rank", r)))));
  }
}

// The status, or Internal if it took long.
absl::Status WithinASecond(CommFuture future) {
  const absl::Time begin = absl::Now();
  const absl::Status status = future.Wait();
  const absl::Duration took = absl::Now() - begin;
  if (took < absl::Seconds(1)) return status;
  return absl::InternalError(absl::StrCat("took ", absl::FormatDuration(took),
                                          ": ", status.message()));
}

TESSERA_RANK_FUNCTION(DifferentCollectives) {
  at::Tensor t = torch::ones({2});
  Communicator& comm = *world.communicator();
  if (world.rank() == 1) {
    return WithinASecond(comm.Broadcast(t, 0, {"broadcast of w"}));
  }
  return WithinASecond(comm.AllReduceSum(t, {"reduce of v"}));
}

TESSERA_RANK_FUNCTION(DifferentSizes) {
  at::Tensor t = torch::ones({world.rank() == 1 ? 2000 : 1000});
  return WithinASecond(world.communicator()->AllReduceSum(t, {"reduce of v"}));
}

TESSERA_RANK_FUNCTION(DifferentDtypes) {
  at::Tensor t =
      torch::ones({1000}, world.rank() == 1 ? torch::kInt : torch::kFloat);
  return WithinASecond(world.communicator()->AllReduceSum(t, {"reduce of v"}));
}

TESSERA_RANK_FUNCTION(DifferentPurposes) {
  at::Tensor t = torch::ones({1000});
  return WithinASecond(world.communicator()->AllReduceSum(
      t, {world.rank() == 0 ? "unit a" : "unit b"}));
}

// Whoever sees it first tells the others, in the same words.
TEST(HangTest, RanksInDifferentCollectivesAreTold) {
  // Neither the grace nor the timeout ends these.
  RankPoolOptions options;
  options.world_size = 3;
  options.announce_grace = absl::Seconds(300);
  RankPool pool(options);
  const std::vector<std::pair<const char*, std::vector<const char*>>> cases = {
      {"DifferentCollectives",
       {"rank 1 in broadcast of w #2 (broadcast from rank 0, 8 bytes of "
        "float32",
        " in reduce of v #2 (all-reduce sum, 8 bytes of float32)"}},
      {"DifferentSizes",
       {" in reduce of v #2 (all-reduce sum, 4000 bytes of float32)",
        " in reduce of v #2 (all-reduce sum, 8000 bytes of float32)"}},
      {"DifferentDtypes", {"4000 bytes of float32", "4000 bytes of int32"}},
      {"DifferentPurposes", {" in unit a #2 (", " in unit b #2 ("}}};
  for (const auto& [function, names] : cases) {
    for (const auto& answer : pool.Run(function, "")) {
      EXPECT_THAT(answer,
                  StatusIs(absl::StatusCode::kFailedPrecondition,
                           AllOf(HasSubstr("the ranks are in different "
                                           "collectives: rank "),
                                 HasSubstr(names[0]), HasSubstr(names[1]))))
          << function;
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
