// Ranks that read each other's shards (comm/shard_server.h), whatever the other
// ranks do meanwhile; and what they see when one ends, stops, announces that it
// failed, or cannot be connected.
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/shard_server.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/comm/collective_checks.h"
#include "tests/support/rank_pool.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

using ServerPtr = std::unique_ptr<ShardServer>;

constexpr absl::StatusCode kUnavailable = absl::StatusCode::kUnavailable;
#if __has_feature(address_sanitizer)
constexpr absl::Duration kSoon = absl::Seconds(10);  // all is slower
#else
constexpr absl::Duration kSoon = absl::Seconds(2);
#endif

int64_t Numel(int64_t key) { return key * key * 11 + key; }

at::Tensor ShardOf(int rank, int64_t key) {
  return torch::arange(Numel(key)).add(1000 * rank + key).to(at::kFloat);
}

at::Tensor WholeOf(int world_size, int64_t key) {
  std::vector<at::Tensor> shards;
  for (int r = 0; r < world_size; ++r) shards.push_back(ShardOf(r, key));
  return torch::cat(shards);
}

constexpr int64_t kVersion = 1;

// One that offers keys 0 to `keys` - 1.
absl::StatusOr<ServerPtr> Serve(Communicator& comm, int64_t keys) {
  TESSERA_ASSIGN_OR_RETURN(ServerPtr server, comm.ServeShards({"shards"}));
  for (int64_t key = 0; key < keys; ++key) {
    server->Offer(key, ShardOf(comm.rank(), key));
  }
  server->SetVersion(kVersion);
  return server;
}

absl::Status PullAndCheck(ShardServer& server, int world_size, int64_t key) {
  at::Tensor whole = torch::zeros({world_size * Numel(key)});
  TESSERA_RETURN_IF_ERROR(server.Pull(key, kVersion, whole, {"unit a"}).Wait());
  return ExpectBits(whole, WholeOf(world_size, key), absl::StrCat(key));
}

// How a pull ends that nobody answers; Internal if it does not do so soon.
absl::Status PullInVain(ShardServer& server, int world_size) {
  const absl::Time begin = absl::Now();
  const absl::Status status =
      server.Pull(0, 7, torch::zeros({world_size}), {"unit v"}).Wait();
  const absl::Duration took = absl::Now() - begin;
  if (took < kSoon) return status;
  return absl::InternalError(absl::StrCat("after ", absl::FormatDuration(took),
                                          ": ", status.message()));
}

RankPoolOptions Options(int world_size) {
  RankPoolOptions options;
  options.world_size = world_size;
  options.announce_grace = absl::Milliseconds(300);
  return options;
}

// ---- pulls ----

int Count(const std::string& folder) {
  int count = 0;
  DIR* const dir = opendir(folder.c_str());
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

// 1,000 pulls of 50 keys, in an order of each rank's own.
absl::Status PullMany(const World& world) {
  constexpr int64_t kKeys = 50, kPulls = 1000;
  const int w = world.world_size();
  TESSERA_ASSIGN_OR_RETURN(const ServerPtr server,
                           Serve(*world.communicator(), kKeys));
  std::mt19937 random(world.rank());
  std::vector<int64_t> keys;
  std::vector<at::Tensor> wholes;
  std::vector<CommFuture> futures;
  for (int64_t i = 0; i < kPulls; ++i) {
    keys.push_back(static_cast<int64_t>(random() % kKeys));
    wholes.push_back(torch::zeros({w * Numel(keys[i])}));
    futures.push_back(server->Pull(keys[i], kVersion, wholes[i], {"unit"}));
  }
  for (int64_t i = 0; i < kPulls; ++i) {
    TESSERA_RETURN_IF_ERROR(futures[i].Wait());
    TESSERA_RETURN_IF_ERROR(
        ExpectBits(wholes[i], WholeOf(w, keys[i]), "a pull"));
  }
  return world.communicator()->Barrier("all have pulled");
}

TESSERA_RANK_FUNCTION(ManyPulls) {
  TESSERA_RETURN_IF_ERROR(PullMany(world));
  const int fds = Count("/proc/self/fd"), threads = Count("/proc/self/task");
  TESSERA_RETURN_IF_ERROR(PullMany(world));
  for (int i = 0; i < 100; ++i) {  // threads take a moment to go
    if (Count("/proc/self/fd") <= fds && Count("/proc/self/task") <= threads) {
      return "ok";
    }
    absl::SleepFor(absl::Milliseconds(20));
  }
  return absl::StrCat("descriptors ", fds, " and ", Count("/proc/self/fd"),
                      ", threads ", threads, " and ", Count("/proc/self/task"));
}

TEST(ServeShardsTest, ManyPullsInAnyOrderLeaveNothing) {
  EXPECT_THAT(RankPool::Get(3)->Run("ManyPulls", ""), Each(IsOkAndHolds("ok")));
  EXPECT_THAT(RankPool::Get(4)->Run("ManyPulls", ""), Each(IsOkAndHolds("ok")));
}

// Rank 1 is in a collective that rank 0 comes to later, rank 2 in its own code.
TESSERA_RANK_FUNCTION(OthersAreBusy) {
  Communicator& comm = *world.communicator();
  TESSERA_ASSIGN_OR_RETURN(const ServerPtr server, Serve(comm, 100));
  if (world.rank() == 2) absl::SleepFor(kSoon + absl::Seconds(1));
  if (world.rank() == 0) {
    const absl::Time begin = absl::Now();
    for (int64_t key = 0; key < 100; ++key) {
      TESSERA_RETURN_IF_ERROR(PullAndCheck(*server, 3, key));
    }
    if (absl::Now() - begin > kSoon) return "late";
  }
  TESSERA_RETURN_IF_ERROR(comm.Barrier("all pulled"));
  return absl::StrCat(absl::StrContains(comm.Report(), "unit a\n") ? "pull"
                                                                   : "");
}

TEST(ServeShardsTest, RanksServeWhateverTheirThreadsDo) {
  const RankPool::Answers answers = RankPool::Get(3)->Run("OthersAreBusy", "");
  EXPECT_THAT(answers,
              testing::ElementsAre(IsOkAndHolds("pull"), IsOkAndHolds(""),
                                   IsOkAndHolds("")));
}

TESSERA_RANK_FUNCTION(ServesInParts) {
  TESSERA_ASSIGN_OR_RETURN(const auto half, world.communicator()->Split(
                                                world.rank() / 2, {"halves"}));
  TESSERA_ASSIGN_OR_RETURN(const ServerPtr server, Serve(*half, 10));
  for (int64_t key : {9, 0, 5}) {
    TESSERA_RETURN_IF_ERROR(PullAndCheck(*server, 2, key));
  }
  TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("all pulled"));
  if (world.rank() == 2) {
    return server->Pull(3, kVersion - 1, torch::zeros({4}), {"unit a"}).Wait();
  }
  absl::SleepFor(kSoon);
  return "served";
}

TEST(ServeShardsTest, PartsServeTheirRanksAndMessagesNameBoth) {
  RankPool pool(Options(4));
  EXPECT_THAT(pool.Run("ServesInParts", "")[2],
              StatusIs(absl::StatusCode::kInternal,
                       AllOf(HasSubstr("unit a of group halves 1.1 #"),
                             HasSubstr("is at version 1"))));
}

TESSERA_RANK_FUNCTION(ServesAlone) {
  return world.communicator()->ServeShards({"shards"}).status();
}

TEST(ServeShardsTest, AWorldOfOneServesNobody) {
  EXPECT_THAT(RankPool::Get(1)->Run("ServesAlone", "")[0],
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("shards")));
}

// ---- failures ----

// Args: microseconds after which rank 2 is killed, while all pull 8 MiB shards.
TESSERA_RANK_FUNCTION(KilledInPulls) {
  int us = 0;
  TORCH_CHECK(absl::SimpleAtoi(args, &us));
  Communicator& comm = *world.communicator();
  TESSERA_ASSIGN_OR_RETURN(const ServerPtr server,
                           comm.ServeShards({"shards"}));
  server->Offer(0, torch::ones({2 << 20}));
  server->SetVersion(kVersion);
  TESSERA_RETURN_IF_ERROR(comm.Barrier("all here"));
  std::thread killer;
  if (world.rank() == 2) {
    killer = std::thread([us] {
      absl::SleepFor(absl::Microseconds(us));
      raise(SIGKILL);
    });
  }
  absl::Time begin;
  absl::Status status;
  while (status.ok()) {  // until it is dead
    begin = absl::Now();
    status =
        server->Pull(0, kVersion, torch::zeros({3 * (2 << 20)}), {"unit k"})
            .Wait();
  }
  if (absl::Now() - begin > kSoon) {
    return absl::InternalError(absl::StrCat("late: ", status.message()));
  }
  // The whole group has failed.
  const absl::Status later = comm.Barrier("later");
  if (later != status) return absl::InternalError(later.message());
  return status;
}

TEST(ServeShardsTest, ARankThatIsKilledInPullsEndsThem) {
  for (int us : {0, 3000, 10000, 40000, 100000}) {
    RankPool pool(Options(3));
    const RankPool::Answers answers =
        pool.Run("KilledInPulls", absl::StrCat(us));
    for (int r : {0, 1}) {
      EXPECT_THAT(answers[r], StatusIs(kUnavailable,
                                       AllOf(HasSubstr("unit k"),
                                             HasSubstr("rank 2 has ended (its "
                                                       "process is gone)"))))
          << us;
    }
  }
}

// Args: microseconds after which rank 2 is killed, while servers are made.
TESSERA_RANK_FUNCTION(KilledInServeShards) {
  int us = 0;
  TORCH_CHECK(absl::SimpleAtoi(args, &us));
  Communicator& comm = *world.communicator();
  TESSERA_RETURN_IF_ERROR(comm.Barrier("all here"));
  std::thread killer;
  if (world.rank() == 2) {
    killer = std::thread([us] {
      absl::SleepFor(absl::Microseconds(us));
      raise(SIGKILL);
    });
  }
  const absl::Time begin = absl::Now();
  absl::Status status;
  while (status.ok()) status = comm.ServeShards({"shards"}).status();
  if (absl::Now() - begin < kSoon) return status;
  return absl::InternalError(absl::StrCat("late: ", status.message()));
}

TEST(ServeShardsTest, ARankThatIsKilledWhileServersAreMadeEndsThat) {
  for (int us : {0, 1000, 3000, 7000}) {
    RankPool pool(Options(3));
    const RankPool::Answers answers =
        pool.Run("KilledInServeShards", absl::StrCat(us));
    for (int r : {0, 1}) {
      EXPECT_THAT(answers[r],
                  StatusIs(kUnavailable, HasSubstr("rank 2 has ended")))
          << us;
    }
  }
}

// No descriptors are left to rank 1.
TESSERA_RANK_FUNCTION(Rank1CannotServe) {
  Communicator& comm = *world.communicator();
  TESSERA_RETURN_IF_ERROR(comm.Barrier("before"));
  rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  if (world.rank() == 1) {
    int spare = 0;
    TORCH_CHECK(absl::SimpleAtoi(args, &spare));
    const int next = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
    close(next);
    const rlimit none = {static_cast<rlim_t>(next + spare), limit.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
  }
  const absl::Status made = comm.ServeShards({"shards"}).status();
  setrlimit(RLIMIT_NOFILE, &limit);
  TESSERA_RETURN_IF_ERROR(comm.Barrier("after"));
  return std::string(made.message());
}

TEST(ServeShardsTest, ServersThatCannotBeMadeAreToldToAllAlike) {
  RankPoolOptions options = Options(3);
  options.collective_timeout = absl::Seconds(8);
  for (int spare : {0, 1, 2, 3}) {
    RankPool pool(options);
    const RankPool::Answers answers =
        pool.Run("Rank1CannotServe", absl::StrCat(spare));
    EXPECT_THAT(
        answers,
        Each(IsOkAndHolds(AllOf(HasSubstr("shards"), HasSubstr("rank 1")))))
        << spare;
    for (const auto& answer : answers) {
      EXPECT_EQ(answer.value_or(""), answers[0].value_or("none"));
    }
  }
}

// Rank 2 is stopped; what is said of it.
TESSERA_RANK_FUNCTION(Rank2IsStopped) {
  Communicator& comm = *world.communicator();
  TESSERA_ASSIGN_OR_RETURN(const ServerPtr server, Serve(comm, 1));
  TESSERA_ASSIGN_OR_RETURN(
      const auto pids, comm.AllGatherStrings(absl::StrCat(getpid()), {"pids"}));
  pid_t pid = 0;
  TORCH_CHECK(absl::SimpleAtoi(pids[2], &pid));
  if (world.rank() == 1) {
    absl::SleepFor(absl::Seconds(8));
    return "served";
  }
  if (world.rank() == 2) {
    raise(SIGSTOP);
    return "stopped";
  }
  absl::SleepFor(absl::Milliseconds(100));
  const absl::Status status =
      server->Pull(0, kVersion, torch::zeros({0}), {"unit s"}).Wait();
  kill(pid, SIGCONT);
  return status;
}

TEST(ServeShardsTest, ATimeoutNamesTheRankThatIsStopped) {
  RankPoolOptions options = Options(3);
  options.collective_timeout = absl::Seconds(5);
  RankPool pool(options);
  EXPECT_THAT(
      pool.Run("Rank2IsStopped", "")[0],
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               AllOf(HasSubstr("unit s #1 (pull, 0 bytes of float32) has not "
                               "ended within 5s: rank 2 has not sent its "
                               "shard 0 of version 1 (last heard of "),
                     HasSubstr("it is stopped, or cannot be reached"),
                     HasSubstr("all its stacks: "))));
}

TESSERA_RANK_FUNCTION(Rank1Announces) {
  Communicator& comm = *world.communicator();
  TESSERA_ASSIGN_OR_RETURN(const ServerPtr server, Serve(comm, 1));
  if (world.rank() != 1) return PullInVain(*server, 3);
  comm.Announce(absl::DataLossError("bad sector"));
  absl::SleepFor(kSoon);
  return comm.Barrier("late");
}

TEST(ServeShardsTest, AnAnnouncementEndsPulls) {
  RankPool pool(Options(3));
  EXPECT_THAT(pool.Run("Rank1Announces", ""),
              Each(StatusIs(kUnavailable, "rank 1 failed: bad sector")));
}

// A pull that fails on rank 0 ends the collective of the others.
TESSERA_RANK_FUNCTION(PullOfThePast) {
  Communicator& comm = *world.communicator();
  TESSERA_ASSIGN_OR_RETURN(const ServerPtr server, Serve(comm, 1));
  if (world.rank() == 0) {
    return server->Pull(0, kVersion - 1, torch::zeros({3}), {"unit p"}).Wait();
  }
  return comm.Barrier("others");
}

TEST(ServeShardsTest, AFailedPullFailsTheGroupOnAllRanks) {
  RankPool pool(Options(3));
  const RankPool::Answers answers = pool.Run("PullOfThePast", "");
  EXPECT_THAT(answers[0], StatusIs(absl::StatusCode::kInternal,
                                   HasSubstr("asked for version 0")));
  for (int r : {1, 2}) {
    EXPECT_THAT(answers[r],
                StatusIs(kUnavailable, AllOf(HasSubstr("rank 0 failed: unit p"),
                                             HasSubstr("version 0"))));
  }
}

TESSERA_RANK_FUNCTION(Rank1StopsServing) {
  TESSERA_ASSIGN_OR_RETURN(ServerPtr server, Serve(*world.communicator(), 1));
  if (world.rank() != 1) return PullInVain(*server, 2);
  const CommFuture mine = server->Pull(0, 7, torch::zeros({2}), {"unit c"});
  server = nullptr;
  absl::SleepFor(kSoon);
  return mine.Wait();
}

TEST(ServeShardsTest, ADestroyedServerEndsPullsHereAndThere) {
  RankPool pool(Options(2));
  EXPECT_THAT(
      pool.Run("Rank1StopsServing", ""),
      testing::ElementsAre(
          StatusIs(kUnavailable, HasSubstr("unit v #1 (pull, 4 bytes of "
                                           "float32): rank 1 serves its shards "
                                           "no more")),
          StatusIs(absl::StatusCode::kCancelled)));
}

}  // namespace
}  // namespace tessera
