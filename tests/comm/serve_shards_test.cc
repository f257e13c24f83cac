// Ranks that read each other's shards (comm/shard_server.h), whatever the other
// ranks do meanwhile; and what they see when one ends or cannot be connected.
// When pulls are given up otherwise: comm/serve/shard_watch_test.cc and
// shard_server_failure_test.cc.
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
#include "tests/support/flag_file.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
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

RankPoolOptions Options(int world_size) {
  RankPoolOptions options;
  options.world_size = world_size;
  options.announce_grace = absl::Milliseconds(300);
  return options;
}

// One pool of three for all: it starts its ranks anew only after a group has
// failed. So the cases in which none fails come first.
class ServeShardsTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    pool_ = std::make_unique<RankPool>(Options(3));
  }
  static void TearDownTestSuite() { pool_ = nullptr; }
  static inline std::unique_ptr<RankPool> pool_;
};

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

TEST_F(ServeShardsTest, ManyPullsInAnyOrderLeaveNothing) {
  EXPECT_THAT(pool_->Run("ManyPulls", ""), Each(IsOkAndHolds("ok")));
}

// Rank 1 is in a collective that rank 0 comes to later, rank 2 in its own code.
// Args: a folder for flags.
TESSERA_RANK_FUNCTION(OthersAreBusy) {
  Communicator& comm = *world.communicator();
  TESSERA_ASSIGN_OR_RETURN(const ServerPtr server, Serve(comm, 100));
  const std::string all_pulled = absl::StrCat(args, "/0");
  if (world.rank() == 2 && !AwaitFlag(all_pulled)) return "rank 0 waits";
  if (world.rank() == 0) {
    for (int64_t key = 0; key < 100; ++key) {
      TESSERA_RETURN_IF_ERROR(PullAndCheck(*server, 3, key));
    }
    RaiseFlag(all_pulled);
  }
  TESSERA_RETURN_IF_ERROR(comm.Barrier("all pulled"));
  return absl::StrCat(absl::StrContains(comm.Report(), "unit a\n") ? "pull"
                                                                   : "");
}

TEST_F(ServeShardsTest, RanksServeWhateverTheirThreadsDo) {
  const TempFolder flags;
  const RankPool::Answers answers = pool_->Run("OthersAreBusy", flags.path());
  EXPECT_THAT(answers,
              testing::ElementsAre(IsOkAndHolds("pull"), IsOkAndHolds(""),
                                   IsOkAndHolds("")));
}

// Args: a folder for flags.
TESSERA_RANK_FUNCTION(ServesInSubgroups) {
  TESSERA_ASSIGN_OR_RETURN(const auto half, world.communicator()->Split(
                                                world.rank() / 2, {"halves"}));
  TESSERA_ASSIGN_OR_RETURN(const ServerPtr server, Serve(*half, 10));
  for (int64_t key : {9, 0, 5}) {
    TESSERA_RETURN_IF_ERROR(PullAndCheck(*server, 2, key));
  }
  TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("all pulled"));
  const std::string rank2_is_through = absl::StrCat(args, "/2");
  if (world.rank() != 2)
    return AwaitFlag(rank2_is_through) ? "served" : "alone";
  const absl::Status status =
      server->Pull(3, kVersion - 1, torch::zeros({4}), {"unit a"}).Wait();
  RaiseFlag(rank2_is_through);
  return status;
}

TEST_F(ServeShardsTest, SubgroupsServeTheirRanksAndMessagesNameBoth) {
  RankPool pool(Options(4));
  const TempFolder flags;
  EXPECT_THAT(pool.Run("ServesInSubgroups", flags.path())[2],
              StatusIs(absl::StatusCode::kInternal,
                       AllOf(HasSubstr("unit a of group halves 1.1 #"),
                             HasSubstr("is at version 1"))));
}

TESSERA_RANK_FUNCTION(ServesAlone) {
  return world.communicator()->ServeShards({"shards"}).status();
}

TEST_F(ServeShardsTest, AWorldOfOneServesNobody) {
  EXPECT_THAT(RankPool::Get(1)->Run("ServesAlone", "")[0],
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("shards")));
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

TEST_F(ServeShardsTest, ServersThatCannotBeMadeAreToldToAll) {
  for (int spare : {0, 1, 2, 3}) {
    const RankPool::Answers answers =
        pool_->Run("Rank1CannotServe", absl::StrCat(spare));
    EXPECT_THAT(
        answers,
        Each(IsOkAndHolds(AllOf(HasSubstr("shards"), HasSubstr("rank 1")))))
        << spare;
    for (const auto& answer : answers) {
      EXPECT_EQ(answer.value_or(""), answers[0].value_or("none"));
    }
  }
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
  // The whole group has failed: told here, by nobody else.
  const absl::Status later =
      comm.AllReduceSum(torch::zeros({0}), {"later"}).Wait();
  if (later != status) return absl::InternalError(later.message());
  return status;
}

TEST_F(ServeShardsTest, ARankThatIsKilledInPullsEndsThem) {
  for (int us : {0, 3000, 40000}) {
    const RankPool::Answers answers =
        pool_->Run("KilledInPulls", absl::StrCat(us));
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

TEST_F(ServeShardsTest, ARankThatIsKilledWhileServersAreMadeEndsThat) {
  for (int us : {0, 3000}) {
    const RankPool::Answers answers =
        pool_->Run("KilledInServeShards", absl::StrCat(us));
    for (int r : {0, 1}) {
      EXPECT_THAT(answers[r],
                  StatusIs(kUnavailable, HasSubstr("rank 2 has ended")))
          << us;
    }
  }
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

TEST_F(ServeShardsTest, AFailedPullFailsTheGroupOnAllRanks) {
  const RankPool::Answers answers = pool_->Run("PullOfThePast", "");
  EXPECT_THAT(answers[0], StatusIs(absl::StatusCode::kInternal,
                                   HasSubstr("asked for version 0")));
  for (int r : {1, 2}) {
    EXPECT_THAT(answers[r],
                StatusIs(kUnavailable, AllOf(HasSubstr("rank 0 failed: unit p"),
                                             HasSubstr("version 0"))));
  }
}

}  // namespace
}  // namespace tessera
