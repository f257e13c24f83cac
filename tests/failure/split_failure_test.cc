// What ranks in parts of a group see when one of them, or one outside of their
// part, ends, hangs, announces that it failed, or cannot be split.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
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
using ::testing::HasSubstr;

constexpr absl::StatusCode kUnavailable = absl::StatusCode::kUnavailable;
#if __has_feature(address_sanitizer)
constexpr absl::Duration kSoon = absl::Seconds(10);  // all is slower
#else
constexpr absl::Duration kSoon = absl::Seconds(2);
#endif

RankPoolOptions FourRanks() {
  RankPoolOptions options;
  options.world_size = 4;
  options.announce_grace = absl::Milliseconds(300);
  return options;
}

// The world of four, and its halves {0, 1} and {2, 3}.
struct Groups {
  std::shared_ptr<Communicator> whole, half;
};

absl::StatusOr<Groups> Halves(const World& world) {
  Groups groups{world.communicator(), nullptr};
  TESSERA_ASSIGN_OR_RETURN(groups.half,
                           groups.whole->Split(world.rank() / 2, {"halves"}));
  TESSERA_RETURN_IF_ERROR(groups.whole->Barrier("all have parts"));
  return groups;
}

// How an all-reduce ends; Internal if it does not do so soon.
absl::Status Reduce(Communicator& comm, const char* what) {
  const absl::Time begin = absl::Now();
  at::Tensor t = torch::ones({1000});
  const absl::Status status = comm.AllReduceSum(t, {what}).Wait();
  const absl::Duration took = absl::Now() - begin;
  if (took < kSoon) return status;
  return absl::InternalError(absl::StrCat("after ", absl::FormatDuration(took),
                                          ": ", status.message()));
}

// The first failure of any group is that of all.
absl::Status ReduceAndSee(const Groups& groups, Communicator& comm,
                          const char* what) {
  const absl::Status first = Reduce(comm, what);
  for (Communicator* other : {groups.whole.get(), groups.half.get()}) {
    const absl::Status later = Reduce(*other, "later");
    if (later != first) {
      return absl::InternalError(
          absl::StrCat("another status later: ", later.message(),
                       "; first: ", first.message()));
    }
  }
  return first;
}

// ---- a rank ends ----

// Rank 2 waits for rank 3 in their half, rank 0 in the other for rank 1, which
// is in its own code.
TESSERA_RANK_FUNCTION(Rank3IsKilled) {
  TESSERA_ASSIGN_OR_RETURN(const Groups groups, Halves(world));
  if (world.rank() == 3) raise(SIGKILL);
  if (world.rank() == 1) {
    absl::SleepFor(kSoon + absl::Seconds(1));
    return ReduceAndSee(groups, *groups.whole, "reduce of w");
  }
  return ReduceAndSee(groups, *groups.half, "reduce of h");
}

TEST(SplitFailureTest, ADeadRankEndsTheWaitsOfAllParts) {
  RankPool pool(FourRanks());
  const RankPool::Answers answers = pool.Run("Rank3IsKilled", "");
  for (int r : {0, 1, 2}) {
    EXPECT_THAT(answers[r],
                StatusIs(kUnavailable, HasSubstr("rank 3 has ended")));
  }
  EXPECT_THAT(answers[2].status().message(),
              HasSubstr("reduce of h of group halves 1.1"));
}

// Args: microseconds after which rank 3 is killed, in the middle of a split.
TESSERA_RANK_FUNCTION(KilledInSplit) {
  int us = 0;
  TORCH_CHECK(absl::SimpleAtoi(args, &us));
  TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("all here"));
  std::thread killer;
  if (world.rank() == 3) {
    killer = std::thread([us] {
      absl::SleepFor(absl::Microseconds(us));
      raise(SIGKILL);
    });
  }
  const absl::Time begin = absl::Now();
  absl::Status status;
  while (status.ok()) {  // until it is dead
    status = world.communicator()->Split(world.rank() / 2, {"halves"}).status();
  }
  if (world.rank() == 3) killer.join();
  if (absl::Now() - begin < kSoon) return status;
  return absl::InternalError(absl::StrCat("late: ", status.message()));
}

TEST(SplitFailureTest, ARankThatIsKilledInASplitEndsIt) {
  for (int us : {0, 1000, 4000, 9000, 16000, 25000}) {
    RankPool pool(FourRanks());
    const RankPool::Answers answers =
        pool.Run("KilledInSplit", absl::StrCat(us));
    for (int r : {0, 1, 2}) {
      EXPECT_THAT(answers[r],
                  StatusIs(kUnavailable, HasSubstr("rank 3 has ended")))
          << us;
    }
  }
}

// Rank 3 gives its half up, and rank 2 does not.
TESSERA_RANK_FUNCTION(HalfIsClosed) {
  TESSERA_ASSIGN_OR_RETURN(Groups groups, Halves(world));
  if (world.rank() == 2) return Reduce(*groups.half, "reduce of h");
  groups.half = nullptr;
  absl::SleepFor(kSoon);
  return "closed";
}

TEST(SplitFailureTest, ARankThatHasClosedAPartEndsTheWaitsThere) {
  RankPool pool(FourRanks());
  EXPECT_THAT(pool.Run("HalfIsClosed", "")[2],
              StatusIs(kUnavailable, HasSubstr("rank 3 has ended")));
}

// ---- announcements ----

// Args: where rank 3 announces, and where rank 0 waits.
TESSERA_RANK_FUNCTION(Rank3Announces) {
  TESSERA_ASSIGN_OR_RETURN(const Groups groups, Halves(world));
  TESSERA_ASSIGN_OR_RETURN(const auto alone,
                           groups.half->Split(world.rank(), {"ranks"}));
  TESSERA_RETURN_IF_ERROR(groups.whole->Barrier("all have parts of parts"));
  const bool waits_in_whole = absl::StrContains(args, "waits in whole");
  switch (world.rank()) {
    case 0:
      return ReduceAndSee(groups, waits_in_whole ? *groups.whole : *groups.half,
                          "reduce");
    case 2:
      return ReduceAndSee(groups, *groups.half, "reduce");
    case 1:
      absl::SleepFor(kSoon);
      return ReduceAndSee(groups, *groups.whole, "late");
    default:
      Communicator& comm =
          absl::StrContains(args, "said in whole")  ? *groups.whole
          : absl::StrContains(args, "said in half") ? *groups.half
                                                    : *alone;
      comm.Announce(absl::DataLossError("bad sector"));
      absl::SleepFor(kSoon);
      return ReduceAndSee(groups, *groups.whole, "late");
  }
}

TEST(SplitFailureTest, AnAnnouncementEndsTheWaitsOfAllGroups) {
  for (const char* said : {"said in whole", "said in half", "said alone"}) {
    for (const char* waits : {", waits in whole", ", waits in half"}) {
      RankPool pool(FourRanks());
      EXPECT_THAT(pool.Run("Rank3Announces", absl::StrCat(said, waits)),
                  Each(StatusIs(kUnavailable, "rank 3 failed: bad sector")))
          << said << waits;
    }
  }
}

// Rank 3 announces and is at the agreement of all; rank 0 waits for rank 1 for
// longer than the grace, and nobody is given up.
TESSERA_RANK_FUNCTION(AnnouncesAndAgrees) {
  TESSERA_ASSIGN_OR_RETURN(const Groups groups, Halves(world));
  for (int round = 0; round < 2; ++round) {
    absl::Status mine;
    if (world.rank() == 3) {
      mine = absl::OutOfRangeError(absl::StrCat("round ", round));
      groups.half->Announce(mine);
    } else if (world.rank() < 2) {
      if (world.rank() == 1) absl::SleepFor(absl::Milliseconds(1500));
      TESSERA_RETURN_IF_ERROR(Reduce(*groups.half, "reduce of h"));
    }
    const absl::Status agreed = groups.whole->AgreeOk(mine, "forward");
    if (agreed.message() != absl::StrCat("[forward] rank 3: round ", round)) {
      return agreed;
    }
    if (world.rank() == 3) groups.whole->ClearAnnouncement();
    TESSERA_RETURN_IF_ERROR(groups.half->Barrier("after"));
  }
  return "ok";
}

TEST(SplitFailureTest, AWaitThatDoesNotNeedTheAnnouncerGoesOn) {
  RankPool pool(FourRanks());
  EXPECT_THAT(pool.Run("AnnouncesAndAgrees", ""), Each(IsOkAndHolds("ok")));
}

TESSERA_RANK_FUNCTION(HalfAnnounces) {
  TESSERA_ASSIGN_OR_RETURN(const Groups groups, Halves(world));
  bool half = false, whole = true;
  if (world.rank() >= 2) {
    groups.whole->Announce(absl::InternalError("alike"));
    half = groups.half->AllAnnounced(absl::Seconds(20));
    whole = groups.whole->AllAnnounced(absl::Milliseconds(50));
  }
  TESSERA_RETURN_IF_ERROR(groups.whole->Barrier("seen"));
  groups.half->ClearAnnouncement();
  return absl::StrCat(half, whole);
}

TEST(SplitFailureTest, AllAnnouncedIsOfTheGroupThatIsAsked) {
  const RankPool::Answers answers = RankPool::Get(4)->Run("HalfAnnounces", "");
  for (int r : {2, 3}) EXPECT_THAT(answers[r], IsOkAndHolds("10"));
}

// ---- a rank is elsewhere ----

TESSERA_RANK_FUNCTION(DifferentInHalf) {
  TESSERA_ASSIGN_OR_RETURN(const Groups groups, Halves(world));
  if (world.rank() != 3) {
    TESSERA_RETURN_IF_ERROR(Reduce(*groups.half, "reduce of h"));
    return "reduced";
  }
  at::Tensor t = torch::ones({1000});
  return groups.half->Broadcast(t, 0, {"broadcast of h"}).Wait();
}

TEST(SplitFailureTest, RanksInDifferentCollectivesOfAPartAreTold) {
  RankPoolOptions options = FourRanks();
  options.announce_grace = absl::Seconds(300);
  RankPool pool(options);
  const RankPool::Answers answers = pool.Run("DifferentInHalf", "");
  for (int r : {0, 1}) EXPECT_THAT(answers[r], IsOkAndHolds("reduced"));
  for (int r : {2, 3}) {
    EXPECT_THAT(
        answers[r],
        StatusIs(absl::StatusCode::kFailedPrecondition,
                 AllOf(HasSubstr("different collectives"),
                       HasSubstr("reduce of h of group halves 1.1"),
                       HasSubstr("broadcast of h of group halves 1.1"),
                       AnyOf(HasSubstr("rank 2"), HasSubstr("rank 3")))));
  }
}

// Rank 2 is in the half, rank 3 in the whole: neither comes to the other.
TESSERA_RANK_FUNCTION(OtherOrder) {
  TESSERA_ASSIGN_OR_RETURN(const Groups groups, Halves(world));
  at::Tensor t = torch::ones({1000});
  if (world.rank() == 2) {
    return groups.half->AllReduceSum(t, {"reduce of h"}).Wait();
  }
  absl::SleepFor(absl::Milliseconds(1500));  // it shall be the first to end
  return groups.whole->AllReduceSum(t, {"reduce of w"}).Wait();
}

TEST(SplitFailureTest, ATimeoutTellsThatARankIsInAnotherGroup) {
  RankPoolOptions options = FourRanks();
  options.collective_timeout = absl::Seconds(4);
  RankPool pool(options);
  for (const auto& answer : pool.Run("OtherOrder", "")) {
    EXPECT_THAT(
        answer,
        StatusIs(absl::StatusCode::kDeadlineExceeded,
                 AllOf(HasSubstr("reduce of h of group halves 1.1 #1 "
                                 "(all-reduce sum, 4000 bytes of float32) has "
                                 "not ended within 4s: rank 3 has not come (it "
                                 "is in reduce of w #"),
                       HasSubstr("; rank 2 has waited in it for "))));
  }
}

// ---- a part that cannot be made ----

// No descriptors are left to rank 3.
TESSERA_RANK_FUNCTION(Rank3CannotSplit) {
  Communicator& whole = *world.communicator();
  TESSERA_RETURN_IF_ERROR(whole.Barrier("before"));
  rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  if (world.rank() == 3) {
    const int next = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
    close(next);
    const rlimit none = {static_cast<rlim_t>(next), limit.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
  }
  const absl::Status split = whole.Split(world.rank() / 2, {"halves"}).status();
  setrlimit(RLIMIT_NOFILE, &limit);
  TESSERA_RETURN_IF_ERROR(whole.Barrier("after"));
  return absl::StrCat(split.ok() ? "split: " : "not split: ", split.message());
}

TEST(SplitFailureTest, APartThatCannotBeMadeIsToldToAllAlike) {
  RankPool pool(FourRanks());
  const RankPool::Answers answers = pool.Run("Rank3CannotSplit", "");
  EXPECT_THAT(answers,
              Each(IsOkAndHolds(AllOf(
                  HasSubstr("not split: [split into halves 1] rank 2: group "
                            "halves 1.1 (ranks 2, 3): rank 3 failed: "),
                  AnyOf(HasSubstr("[rank 3] shared memory: memfd_create: "),
                        HasSubstr("gloo: "))))));
  for (const auto& answer : answers) EXPECT_EQ(*answer, *answers[0]);
}

}  // namespace
}  // namespace tessera
