// Shard servers of several ranks in one process: bits, versions and costs. How
// pulls fail is in shard_server_failure_test.cc; ranks as processes are in
// tests/comm/serve_shards_test.cc.
#include "comm/shard_server.h"

#include <dirent.h>
#include <time.h>

#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/barrier.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/monotonic.h"
#include "base/status_matchers.h"
#include "comm/serve/shard_server_testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// What `rank` has as `key` at `version`.
at::Tensor ShardOf(int rank, int64_t key, int64_t version, int64_t numel,
                   at::ScalarType dtype = at::kFloat) {
  return torch::arange(numel, at::kLong)
      .add(1000 * rank + 17 * key + 3 * version)
      .remainder(dtype == at::kBool ? 2 : 119)
      .to(dtype);
}

at::Tensor WholeOf(int world_size, int64_t key, int64_t version, int64_t numel,
                   at::ScalarType dtype = at::kFloat) {
  std::vector<at::Tensor> shards;
  for (int r = 0; r < world_size; ++r) {
    shards.push_back(ShardOf(r, key, version, numel, dtype));
  }
  return torch::cat(shards);
}

// The end of a future, seen from outside.
class Ending {
 public:
  explicit Ending(CommFuture future)
      : thread_([this, future] {
          (void)future.Wait();
          ended_.Notify();
        }) {}
  ~Ending() { thread_.join(); }

  bool Within(absl::Duration timeout) {
    return ended_.WaitForNotificationWithTimeout(timeout);
  }

 private:
  absl::Notification ended_;
  std::thread thread_;
};

// ---- ends ----

TEST(ShardServerTest, ARetiredServerAnswersUntilAllHaveRetired) {
  Ranks ranks(3);
  ranks.StartAll();
  for (int r = 0; r < 3; ++r) {
    ranks[r].server->Offer(0, ShardOf(r, 0, 0, 100));
    ranks[r].server->SetVersion(0);
  }
  Ending first(ranks[0].server->Retire());
  Ending second(ranks[1].server->Retire());
  at::Tensor whole = torch::zeros({300});
  TESSERA_ASSERT_OK(ranks[2].server->Pull(0, 0, whole, {"unit"}).Wait());
  EXPECT_TRUE(whole.equal(WholeOf(3, 0, 0, 100)));
  EXPECT_FALSE(first.Within(absl::Milliseconds(50)));
  EXPECT_THAT(ranks[0].server->Pull(0, 0, whole, {"unit"}).Wait(),
              StatusIs(absl::StatusCode::kCancelled));
  ranks[2].server = nullptr;
  EXPECT_TRUE(first.Within(absl::Seconds(20)));
  EXPECT_TRUE(second.Within(absl::Seconds(20)));
}

// ---- bits ----

TEST(ShardServerTest, WholesHaveTheOwnersBits) {
  Ranks ranks(3);
  ranks.StartAll();
  int64_t key = 0;
  for (at::ScalarType dtype :
       {at::kByte, at::kChar, at::kBool, at::kShort, at::kInt, at::kLong,
        at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat}) {
    for (int64_t numel : {0, 1, 3, 997, 4096, 100003}) {
      for (int r = 0; r < 3; ++r) {
        ranks[r].server->Offer(key, ShardOf(r, key, 0, numel, dtype));
        ranks[r].server->SetVersion(0);
      }
      for (int r = 0; r < 3; ++r) {
        at::Tensor whole = torch::zeros({3 * numel}, dtype);
        TESSERA_ASSERT_OK(
            ranks[r].server->Pull(key, 0, whole, {"unit"}).Wait());
        EXPECT_TRUE(whole.equal(WholeOf(3, key, 0, numel, dtype)))
            << c10::toString(dtype) << " " << numel << " rank " << r;
      }
      ++key;
    }
  }
}

TEST(ShardServerTest, LargeShardsAndTheOwnSliceInPlace) {
  Ranks ranks(2);
  ranks.StartAll();
  const int64_t numel = (8 << 20) + 1;
  std::vector<at::Tensor> wholes;
  for (int r = 0; r < 2; ++r) {
    wholes.push_back(torch::zeros({2 * numel}, at::kByte));
    at::Tensor own = wholes[r].narrow(0, r * numel, numel);
    own.copy_(ShardOf(r, 5, 2, numel, at::kByte));
    ranks[r].server->Offer(5, own);
    ranks[r].server->SetVersion(2);
  }
  std::vector<CommFuture> futures;
  for (int r = 0; r < 2; ++r) {
    futures.push_back(ranks[r].server->Pull(5, 2, wholes[r], {"large"}));
  }
  for (int r = 0; r < 2; ++r) {
    TESSERA_ASSERT_OK(futures[r].Wait());
    EXPECT_TRUE(wholes[r].equal(WholeOf(2, 5, 2, numel, at::kByte)));
  }
}

// Pulls 50 keys, in another order on each of two threads of each rank.
TEST(ShardServerTest, ManyPullsInDifferentOrders) {
  constexpr int kKeys = 50, kPulls = 1000, kThreads = 2;
  Ranks ranks(3);
  ranks.StartAll();
  const auto numel = [](int64_t key) { return key * key * 7 + key; };
  for (int r = 0; r < 3; ++r) {
    for (int64_t key = 0; key < kKeys; ++key) {
      ranks[r].server->Offer(key, ShardOf(r, key, 0, numel(key)));
    }
    ranks[r].server->SetVersion(0);
  }
  const auto pull_all = [&](int r, int seed) {
    std::mt19937 random(seed);
    std::vector<std::pair<int64_t, at::Tensor>> wholes;
    std::vector<CommFuture> futures;
    for (int i = 0; i < kPulls / kThreads; ++i) {
      const int64_t key = random() % kKeys;
      wholes.emplace_back(key, torch::zeros({3 * numel(key)}));
      futures.push_back(
          ranks[r].server->Pull(key, 0, wholes.back().second, {"many"}));
    }
    for (size_t i = 0; i < futures.size(); ++i) {
      TESSERA_ASSERT_OK(futures[i].Wait());
      const auto& [key, whole] = wholes[i];
      ASSERT_TRUE(whole.equal(WholeOf(3, key, 0, numel(key)))) << key;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 3 * kThreads; ++i) {
    threads.emplace_back(pull_all, i / kThreads, i);
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(ShardServerTest, BadWholesAreRefusedAndFailNothing) {
  Ranks ranks(2);
  ranks.StartAll();
  for (const at::Tensor& whole :
       {at::Tensor(), torch::zeros({3}), torch::zeros({4, 4}).t()}) {
    EXPECT_THAT(
        ranks[0].server->Pull(0, 0, whole, {"unit a"}).Wait(),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("unit a")));
  }
  EXPECT_THAT(ranks[0].server->Pull(0, -1, torch::zeros({2}), {"unit"}).Wait(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("-1")));
  TESSERA_EXPECT_OK(ranks[0].failure());
}

// ---- versions ----

TEST(ShardServerTest, APullWaitsForOffersAndVersionsOfAll) {
  Ranks ranks(2);
  ranks.StartAll();
  at::Tensor whole = torch::zeros({20});
  const CommFuture future = ranks[0].server->Pull(7, 4, whole, {"unit"});
  Ending ending(future);
  const absl::Duration moment = absl::Milliseconds(60);
  ranks[1].server->SetVersion(4);
  EXPECT_FALSE(ending.Within(moment));
  ranks[1].server->Offer(7, ShardOf(1, 7, 4, 10));
  EXPECT_FALSE(ending.Within(moment));
  ranks[0].server->Offer(7, ShardOf(0, 7, 4, 10));
  ranks[0].server->SetVersion(3);
  EXPECT_FALSE(ending.Within(moment));
  ranks[0].server->SetVersion(4);
  TESSERA_ASSERT_OK(future.Wait());
  EXPECT_TRUE(whole.equal(WholeOf(2, 7, 4, 10)));
}

// Each rank writes the next version as soon as all have asked for it, which
// they do when they have the last one.
TEST(ShardServerTest, NoValueIsTorn) {
  constexpr int kWorld = 3, kVersions = 150, kKeys = 3;
  const int64_t numel = 30011;
  Ranks ranks(kWorld);
  ranks.StartAll();
  std::vector<std::unique_ptr<absl::Barrier>> asked;
  for (int v = 0; v < kVersions; ++v) {
    asked.push_back(std::make_unique<absl::Barrier>(kWorld));
  }
  const auto run = [&](int r) {
    std::vector<at::Tensor> shards;
    for (int key = 0; key < kKeys; ++key) {
      shards.push_back(torch::zeros({numel}, at::kInt));
      ranks[r].server->Offer(key, shards[key]);
    }
    for (int v = 0; v < kVersions; ++v) {
      std::vector<at::Tensor> wholes;
      std::vector<CommFuture> futures;
      for (int key = 0; key < kKeys; ++key) {
        wholes.push_back(torch::zeros({kWorld * numel}, at::kInt));
        futures.push_back(
            ranks[r].server->Pull(key, v, wholes[key], {"stress"}));
      }
      (void)asked[v]->Block();
      for (int key = 0; key < kKeys; ++key) {
        shards[key].fill_(1000 * v + 10 * r + key);
      }
      ranks[r].server->SetVersion(v);
      for (int key = 0; key < kKeys; ++key) {
        TESSERA_ASSERT_OK(futures[key].Wait());
        for (int p = 0; p < kWorld; ++p) {
          ASSERT_TRUE(wholes[key]
                          .narrow(0, p * numel, numel)
                          .eq(1000 * v + 10 * p + key)
                          .all()
                          .item<bool>());
        }
      }
    }
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < kWorld; ++r) threads.emplace_back(run, r);
  for (std::thread& thread : threads) thread.join();
}

// ---- costs ----

TEST(ShardServerTest, PullsAreRecordedAndCounted) {
  Ranks ranks(3);
  ranks.StartAll();
  for (int r = 0; r < 3; ++r) ranks[r].server->Offer(0, torch::zeros({10}));
  for (int r : {0, 1}) ranks[r].server->SetVersion(0);
  const absl::Duration begin = MonotonicNow();
  const CommFuture future =
      ranks[0].server->Pull(0, 0, torch::zeros({30}), {"unit a"});
  const absl::Duration asked = MonotonicNow();
  EXPECT_THAT(
      ranks[0].records.ToText(),
      AllOf(HasSubstr("RUNNING"),
            HasSubstr("pull, 80 bytes of float32  unit a  comm/serve/")));
  const absl::Duration released = MonotonicNow();
  ranks[2].server->SetVersion(0);
  TESSERA_ASSERT_OK(future.Wait());
  EXPECT_THAT(ranks[0].records.ToText(), HasSubstr("done"));
  EXPECT_THAT(ranks[0].costs.ToText("gloo"),
              ContainsRegex("pull +1 +80 .*unit a"));
  const std::vector<absl::Duration> waits = ranks[0].costs.waits();
  EXPECT_EQ(waits[0], absl::ZeroDuration());
  // Each moment is charged to one rank, and rank 2 kept all others waiting.
  EXPECT_LE(waits[1] + waits[2], MonotonicNow() - begin);
  EXPECT_GE(waits[1] + waits[2], released - asked);
  EXPECT_GT(waits[2], absl::ZeroDuration());
}

absl::Duration ProcessorTime() {
  timespec used = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return absl::DurationFromTimespec(used);
}

TEST(ShardServerTest, WaitingTakesNoProcessorTime) {
  Ranks ranks(3);
  ranks.StartAll();
  const CommFuture future =
      ranks[0].server->Pull(0, 0, torch::zeros({3}), {"unit"});
  ranks[2].server = nullptr;  // nor does a closed connection
  for (int r : {0, 1}) ranks[r].server->SetVersion(-1);
  const absl::Duration before = ProcessorTime();
  absl::SleepFor(absl::Milliseconds(250));
  EXPECT_LT(ProcessorTime() - before, absl::Milliseconds(50));
}

int Count(const std::string& folder) {
  int count = 0;
  DIR* const dir = opendir(folder.c_str());
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

TEST(ShardServerTest, NothingIsLeft) {
  const auto use = [] {
    Ranks ranks(3);
    ranks.StartAll();
    for (int r = 0; r < 3; ++r) {
      ranks[r].server->Offer(0, torch::zeros({10}));
      ranks[r].server->SetVersion(0);
    }
    (void)ranks[0].server->Pull(1, 0, torch::zeros({30}), {"never"});
    TESSERA_EXPECT_OK(
        ranks[1].server->Pull(0, 0, torch::zeros({30}), {"unit"}).Wait());
  };
  use();
  const int fds = Count("/proc/self/fd");
  const int threads = Count("/proc/self/task");
  for (int i = 0; i < 5; ++i) use();
  EXPECT_LE(Count("/proc/self/fd"), fds);
  for (int i = 0; i < 100 && Count("/proc/self/task") > threads; ++i) {
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_LE(Count("/proc/self/task"), threads);
}

}  // namespace
}  // namespace tessera
