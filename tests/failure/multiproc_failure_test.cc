// What ranks see when one of them ends, hangs, or announces that it failed:
// what of it depends on how a backend's waits break and are aborted. When waits
// are ended, and who is named, is in comm/watch/wait_judge_test.cc and
// wait_monitor_test.cc.
#include <signal.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/flag_file.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::Each;
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

struct EndCase {
  int world_size;
  const char* how;
};

TEST(RankEndsTest, TheOthersSayWhoAndWhere) {
  for (const auto& [w, how] : {EndCase{2, "exit"}, EndCase{4, "kill"}}) {
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

TEST(RankEndsTest, WhatItAnnouncedIsHeard) {
  RankPool pool(ShortPatience(3));
  const RankPool::Answers answers = pool.Run("LastRankEnds", "error");
  for (int r : {0, 1}) {
    EXPECT_THAT(answers[r],
                StatusIs(kUnavailable, "rank 2 failed: bad sector"));
  }
}

// ---- a rank does not come ----

// Args: a folder for flags.
TESSERA_RANK_FUNCTION(Rank1StaysAway) {
  const std::string folder(args);
  if (world.rank() == 1) {
    return AwaitFlag(folder + "/0") && AwaitFlag(folder + "/2") ? "late"
                                                                : "alone";
  }
  const absl::Status status = AllReduce(world, 100, "reduce of unit c.2");
  RaiseFlag(absl::StrCat(folder, "/", world.rank()));
  return status;
}

TEST(HangTest, EndsByItsTimeoutAndNamesTheCollective) {
  RankPoolOptions options = ShortPatience(3);
  options.collective_timeout = absl::Seconds(2);
  RankPool pool(options);
  // Starts the ranks, so that the times below are those of the hang.
  EXPECT_THAT(pool.Run("NoSuch", ""),
              Each(StatusIs(absl::StatusCode::kNotFound)));
  const absl::Time begin = absl::Now();
  const TempFolder flags;
  const RankPool::Answers answers = pool.Run("Rank1StaysAway", flags.path());
  EXPECT_LT(absl::Now() - begin, absl::Seconds(12));
  EXPECT_THAT(answers[1], IsOkAndHolds("late"));
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

// The status, or Internal if it took long. Neither the grace nor the timeout
// ends these.
absl::Status Soon(CommFuture future) {
  const absl::Time begin = absl::Now();
  const absl::Status status = future.Wait();
  const absl::Duration took = absl::Now() - begin;
  if (took < absl::Seconds(10)) return status;
  return absl::InternalError(absl::StrCat("took ", absl::FormatDuration(took),
                                          ": ", status.message()));
}

TESSERA_RANK_FUNCTION(DifferentSizes) {
  at::Tensor t = torch::ones({world.rank() == 1 ? 2000 : 1000});
  return Soon(world.communicator()->AllReduceSum(t, {"reduce of v"}));
}

TESSERA_RANK_FUNCTION(DifferentPurposes) {
  at::Tensor t = torch::ones({1000});
  return Soon(world.communicator()->AllReduceSum(
      t, {world.rank() == 0 ? "unit a" : "unit b"}));
}

// Whoever sees it first tells the others, in the same words. That may be the
// watching thread, or the transport where it compares, if that thread is late:
// then the number stands at the end.
TEST(HangTest, RanksInDifferentCollectivesAreTold) {
  RankPoolOptions options;
  options.world_size = 3;
  options.announce_grace = absl::Seconds(300);
  RankPool pool(options);
  const std::vector<std::pair<const char*, std::vector<const char*>>> cases = {
      {"DifferentSizes",
       {" in reduce of v (#2 )?\\(all-reduce sum, 4000 bytes of float32\\)",
        " in reduce of v (#2 )?\\(all-reduce sum, 8000 bytes of float32\\)"}},
      {"DifferentPurposes", {" in unit a (#2 )?\\(", " in unit b (#2 )?\\("}}};
  for (const auto& [function, names] : cases) {
    for (const auto& answer : pool.Run(function, "")) {
      EXPECT_THAT(answer, StatusIs(absl::StatusCode::kFailedPrecondition,
                                   AllOf(HasSubstr("the ranks are in different "
                                                   "collectives: "),
                                         ContainsRegex(names[0]),
                                         ContainsRegex(names[1]))))
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
  RankPool pool(ShortPatience(3));
  const absl::Time begin = absl::Now();
  const RankPool::Answers answers = pool.Run("Rank1Announces", "");
  EXPECT_LT(absl::Now() - begin, absl::Seconds(30));
  EXPECT_THAT(answers, Each(StatusIs(kUnavailable,
                                     "rank 1 failed: unit d.3: out of "
                                     "memory")));
}

}  // namespace
}  // namespace tessera
