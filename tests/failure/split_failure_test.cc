// What ranks in subgroups see when one of them, or one outside of their
// subgroup, ends, closes it, announces that it failed, or cannot be split: what
// of it depends on the backend. When waits are ended, and who is named, is in
// comm/watch/wait_judge_test.cc and wait_monitor_test.cc.
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
#include "comm/mesh/mesh.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/flag_file.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr absl::StatusCode kUnavailable = absl::StatusCode::kUnavailable;
#if __has_feature(address_sanitizer)
constexpr absl::Duration kSoon = absl::Seconds(10);  // all is slower
#else
constexpr absl::Duration kSoon = absl::Seconds(2);
#endif

constexpr absl::Duration kGrace = absl::Milliseconds(300);

RankPoolOptions FourRanks() {
  RankPoolOptions options;
  options.world_size = 4;
  options.announce_grace = kGrace;
  return options;
}

// One pool for all: it starts its ranks anew only after a group has failed. So
// the cases in which none fails come first.
class SplitFailureTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    pool_ = std::make_unique<RankPool>(FourRanks());
  }
  static void TearDownTestSuite() { pool_ = nullptr; }
  static inline std::unique_ptr<RankPool> pool_;
};

// The world of four, and its halves {0, 1} and {2, 3}.
struct Groups {
  std::shared_ptr<Communicator> whole, half;
};

absl::StatusOr<Groups> Halves(const World& world) {
  Groups groups{world.communicator(), nullptr};
  TESSERA_ASSIGN_OR_RETURN(groups.half,
                           groups.whole->Split(world.rank() / 2, {"halves"}));
  TESSERA_RETURN_IF_ERROR(groups.whole->Barrier("all have subgroups"));
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

// ---- announcements that end nothing ----

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
      if (world.rank() == 1) absl::SleepFor(3 * kGrace);
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

TEST_F(SplitFailureTest, AWaitThatDoesNotNeedTheAnnouncerGoesOn) {
  EXPECT_THAT(pool_->Run("AnnouncesAndAgrees", ""), Each(IsOkAndHolds("ok")));
}

TESSERA_RANK_FUNCTION(HalfAnnounces) {
  TESSERA_ASSIGN_OR_RETURN(const Groups groups, Halves(world));
  bool half = false, whole = true;
  if (world.rank() >= 2) {
    groups.whole->Announce(absl::InternalError("the same"));
    half = groups.half->AllAnnounced(absl::Seconds(20));
    whole = groups.whole->AllAnnounced(absl::Milliseconds(50));
  }
  TESSERA_RETURN_IF_ERROR(groups.whole->Barrier("seen"));
  groups.half->ClearAnnouncement();
  return absl::StrCat(half, whole);
}

TEST_F(SplitFailureTest, AllAnnouncedIsOfTheGroupThatIsAsked) {
  const RankPool::Answers answers = pool_->Run("HalfAnnounces", "");
  for (int r : {2, 3}) EXPECT_THAT(answers[r], IsOkAndHolds("10"));
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

// Over shared memory rank 2 reads of it from rank 3's verdict when they
// connect, and may also see before it gives up that rank 3 has announced it;
// which is first differs from run to run. Over gloo it has only the
// announcement.
TEST_F(SplitFailureTest, APartThatCannotBeMadeIsToldToAll) {
  const RankPool::Answers answers = pool_->Run("Rank3CannotSplit", "");
  EXPECT_THAT(
      answers,
      Each(IsOkAndHolds(
          AllOf(ContainsRegex("not split: \\[split into halves [0-9]+\\] rank "
                              "2: group halves [0-9]+\\.1 \\(ranks 2, 3\\): "),
                AnyOf(HasSubstr("[rank 3] shared memory: memfd_create: "),
                      HasSubstr("rank 3 failed: gloo: "))))));
  for (const auto& answer : answers) EXPECT_EQ(*answer, *answers[0]);
}

// ---- a rank ends ----

// Rank 2 waits for rank 3 in their half, rank 0 in the other for rank 1, which
// is in its own code. Args: a folder for flags.
TESSERA_RANK_FUNCTION(Rank3IsKilled) {
  TESSERA_ASSIGN_OR_RETURN(const Groups groups, Halves(world));
  if (world.rank() == 3) raise(SIGKILL);
  const std::string rank0_is_through = absl::StrCat(args, "/0");
  if (world.rank() == 1) {
    if (!AwaitFlag(rank0_is_through)) return "rank 0 waits for ever";
    return ReduceAndSee(groups, *groups.whole, "reduce of w");
  }
  const absl::Status status = ReduceAndSee(groups, *groups.half, "reduce of h");
  if (world.rank() == 0) RaiseFlag(rank0_is_through);
  return status;
}

TEST_F(SplitFailureTest, ADeadRankEndsTheWaitsOfAllSubgroups) {
  const TempFolder flags;
  const RankPool::Answers answers = pool_->Run("Rank3IsKilled", flags.path());
  for (int r : {0, 1, 2}) {
    EXPECT_THAT(answers[r],
                StatusIs(kUnavailable, HasSubstr("rank 3 has ended")));
  }
  EXPECT_THAT(std::string(answers[2].status().message()),
              ContainsRegex("reduce of h of group halves [0-9]+\\.1"));
}

// Rank 3 ends, whom rank 0 meets on no axis. Collectives of both axes are under
// way, in one order on all ranks.
TESSERA_RANK_FUNCTION(Rank3LeavesTheMesh) {
  TESSERA_ASSIGN_OR_RETURN(
      const auto mesh, Mesh::Create(world.communicator(),
                                    {{"dp_replicate", 2}, {"dp_shard", 2}}));
  TESSERA_RETURN_IF_ERROR(mesh->MakeGroup("dp_shard"));
  TESSERA_RETURN_IF_ERROR(mesh->MakeGroup("dp_replicate"));
  TESSERA_RETURN_IF_ERROR(mesh->job()->Barrier("all have groups"));
  if (world.rank() == 3) raise(SIGKILL);
  const absl::Time begin = absl::Now();
  absl::Status first;
  while (first.ok()) {  // until those who meet rank 3 have failed
    at::Tensor sum = torch::ones({1000});
    const CommFuture within = mesh->group("dp_shard")->AllReduceSum(sum, {"s"});
    first = mesh->group("dp_replicate")->AllReduceSum(sum, {"r"}).Wait();
    first.Update(within.Wait());
  }
  if (absl::Now() - begin > kSoon) return absl::InternalError("late");
  for (const char* axis : {"dp_shard", "dp_replicate"}) {
    if (Reduce(*mesh->group(axis), "later") != first) {
      return absl::InternalError("another status later");
    }
  }
  return first;
}

TEST_F(SplitFailureTest, ADeadRankEndsTheWaitsOfAllAxes) {
  const RankPool::Answers answers = pool_->Run("Rank3LeavesTheMesh", "");
  for (int r : {0, 1, 2}) {
    EXPECT_THAT(answers[r],
                StatusIs(kUnavailable, HasSubstr("rank 3 has ended")));
  }
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

TEST_F(SplitFailureTest, ARankThatIsKilledInASplitEndsIt) {
  for (int us : {0, 4000, 16000}) {
    const RankPool::Answers answers =
        pool_->Run("KilledInSplit", absl::StrCat(us));
    for (int r : {0, 1, 2}) {
      EXPECT_THAT(answers[r],
                  StatusIs(kUnavailable, HasSubstr("rank 3 has ended")))
          << us;
    }
  }
}

// Rank 3 gives its half up, and rank 2 does not. Args: a folder for flags.
TESSERA_RANK_FUNCTION(HalfIsClosed) {
  TESSERA_ASSIGN_OR_RETURN(Groups groups, Halves(world));
  const std::string rank2_is_through = absl::StrCat(args, "/2");
  if (world.rank() == 2) {
    const absl::Status status = Reduce(*groups.half, "reduce of h");
    RaiseFlag(rank2_is_through);
    return status;
  }
  groups.half = nullptr;
  return AwaitFlag(rank2_is_through) ? "closed" : "rank 2 waits for ever";
}

TEST_F(SplitFailureTest, ARankThatHasClosedAPartEndsTheWaitsThere) {
  const TempFolder flags;
  EXPECT_THAT(pool_->Run("HalfIsClosed", flags.path())[2],
              StatusIs(kUnavailable, HasSubstr("rank 3 has ended")));
}

// ---- announcements that end waits ----

// Args: a folder for flags, where rank 3 announces, and where rank 0 waits.
TESSERA_RANK_FUNCTION(Rank3Announces) {
  TESSERA_ASSIGN_OR_RETURN(const Groups groups, Halves(world));
  TESSERA_ASSIGN_OR_RETURN(const auto alone,
                           groups.half->Split(world.rank(), {"ranks"}));
  TESSERA_RETURN_IF_ERROR(
      groups.whole->Barrier("all have subgroups of subgroups"));
  const std::string folder(args.substr(0, args.find(' ')));
  if (world.rank() == 3) {
    Communicator& comm =
        absl::StrContains(args, "posts in half") ? *groups.half : *alone;
    comm.Announce(absl::DataLossError("bad sector"));
  }
  if (world.rank() == 1 || world.rank() == 3) {  // they come late
    if (!AwaitFlag(folder + "/0") || !AwaitFlag(folder + "/2")) return "alone";
    return ReduceAndSee(groups, *groups.whole, "late");
  }
  const bool in_whole =
      world.rank() == 0 && absl::StrContains(args, "waits in whole");
  const absl::Status status =
      ReduceAndSee(groups, in_whole ? *groups.whole : *groups.half, "reduce");
  RaiseFlag(absl::StrCat(folder, "/", world.rank()));
  return status;
}

TEST_F(SplitFailureTest, AnAnnouncementEndsTheWaitsOfAllGroups) {
  for (const char* how :
       {"posts alone, waits in whole", "posts in half, waits in half"}) {
    const TempFolder flags;
    EXPECT_THAT(
        pool_->Run("Rank3Announces", absl::StrCat(flags.path(), " ", how)),
        Each(StatusIs(kUnavailable, "rank 3 failed: bad sector")))
        << how;
  }
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

TEST_F(SplitFailureTest, RanksInDifferentCollectivesOfAPartAreTold) {
  const RankPool::Answers answers = pool_->Run("DifferentInHalf", "");
  for (int r : {0, 1}) EXPECT_THAT(answers[r], IsOkAndHolds("reduced"));
  for (int r : {2, 3}) {
    EXPECT_THAT(
        answers[r],
        StatusIs(
            absl::StatusCode::kFailedPrecondition,
            AllOf(HasSubstr("different collectives"),
                  ContainsRegex("reduce of h of group halves [0-9]+\\.1"),
                  ContainsRegex("broadcast of h of group halves [0-9]+\\.1"),
                  AnyOf(HasSubstr("rank 2"), HasSubstr("rank 3")))));
  }
}

}  // namespace
}  // namespace tessera
