// The communication thread, the world of one, and what needs no second rank.
#include <sched.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "base/status_matchers.h"
#include "comm/comm_thread.h"
#include "comm/communicator.h"
#include "comm/group/self_communicator.h"
#include "comm/rendezvous/abandonable.h"
#include "comm/rendezvous/rendezvous.h"
#include "comm/rendezvous/start_watch.h"
#include "comm/world/make_group.h"
#include "comm/world/world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST(CommFutureTest, DefaultIsDone) {
  EXPECT_FALSE(CommFuture().valid());
  TESSERA_EXPECT_OK(CommFuture().Wait());
}

TEST(CommThreadTest, RunsInOrderWithoutAutograd) {
  CommThread thread;
  std::vector<int> order;
  std::vector<CommFuture> futures;
  for (int i = 0; i < 100; ++i) {
    futures.push_back(thread.Post([&order, i]() -> absl::Status {
      order.push_back(i);
      if (at::GradMode::is_enabled()) return absl::InternalError("grad mode");
      if (!CommThread::IsCurrent()) return absl::InternalError("thread");
      return i == 50 ? absl::DataLossError("fifty") : absl::OkStatus();
    }));
  }
  TESSERA_EXPECT_OK(futures[99].Wait());
  EXPECT_THAT(order, SizeIs(100));
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_THAT(futures[50].Wait(), StatusIs(absl::StatusCode::kDataLoss));
  EXPECT_THAT(futures[50].Wait(), StatusIs(absl::StatusCode::kDataLoss));
  EXPECT_FALSE(CommThread::IsCurrent());
  thread.Stop();
}

TEST(CommThreadTest, FollowsItsCallers) {
  cpu_set_t all;
  ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
  CommThread thread;
  thread.FollowCallers();
  for (int round = 0; round < 2; ++round) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &all)) continue;
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
      int there = -1;
      TESSERA_EXPECT_OK(thread
                            .Post([&there] {
                              there = sched_getcpu();
                              return absl::OkStatus();
                            })
                            .Wait());
      EXPECT_EQ(there, cpu);
    }
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
  thread.Stop();
}

TEST(CommThreadTest, AnExceptionIsAStatus) {
  CommThread thread;
  CommFuture future =
      thread.Post([]() -> absl::Status { throw std::runtime_error("boo"); });
  EXPECT_THAT(future.Wait(),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("boo")));
  thread.Stop();
}

TEST(CommThreadTest, StopRunsWhatIsQueuedAndPostStartsAgain) {
  CommThread thread;
  absl::Notification go;
  int ran = 0;
  CommFuture inner;
  thread.Post([&] {
    go.WaitForNotification();
    // Work may queue more work.
    thread.Post([&] {
      ++ran;
      return absl::OkStatus();
    });
    return absl::OkStatus();
  });
  CommFuture last = thread.Post([&] {
    ++ran;
    return absl::OkStatus();
  });
  go.Notify();
  thread.Stop();
  EXPECT_EQ(ran, 2);
  TESSERA_EXPECT_OK(last.Wait());
  TESSERA_EXPECT_OK(thread
                        .Post([&] {
                          ++ran;
                          return absl::OkStatus();
                        })
                        .Wait());
  EXPECT_EQ(ran, 3);
  thread.Stop();
  thread.Stop();
}

TEST(CommThreadTest, WorkIsDestroyedBeforeItsFutureEnds) {
  CommThread thread;
  auto held = std::make_shared<int>(1);
  std::weak_ptr<int> seen = held;
  CommFuture future =
      thread.Post([held = std::move(held)] { return absl::OkStatus(); });
  TESSERA_EXPECT_OK(future.Wait());
  EXPECT_TRUE(seen.expired());
  thread.Stop();
}

class SelfTest : public testing::Test {
 protected:
  std::shared_ptr<Communicator> comm_ = MakeSelfCommunicator();
};

TEST_F(SelfTest, CollectivesCopy) {
  EXPECT_EQ(comm_->rank(), 0);
  EXPECT_EQ(comm_->world_size(), 1);
  EXPECT_EQ(comm_->backend(), "self");
  const at::Tensor a = torch::arange(5, torch::kDouble);
  at::Tensor b = torch::zeros({5}, torch::kDouble);
  TESSERA_EXPECT_OK(comm_->AllGather(a, b, {"gather"}).Wait());
  EXPECT_TRUE(torch::equal(a, b));
  b.zero_();
  TESSERA_EXPECT_OK(comm_->ReduceScatterSum(a, b, {"scatter"}).Wait());
  EXPECT_TRUE(torch::equal(a, b));
  TESSERA_EXPECT_OK(comm_->AllGather(b, b, {"in place"}).Wait());
  TESSERA_EXPECT_OK(comm_->AllReduceSum(b, {"reduce"}).Wait());
  TESSERA_EXPECT_OK(comm_->Broadcast(b, 0, {"broadcast"}).Wait());
  EXPECT_TRUE(torch::equal(a, b));
  TESSERA_EXPECT_OK(comm_->AllReduceSum(torch::zeros({0}), {"nothing"}).Wait());
}

TEST_F(SelfTest, StringsAndAgreement) {
  EXPECT_THAT(comm_->AllGatherStrings("x\0y", {"names"}),
              IsOkAndHolds(ElementsAre("x")));
  EXPECT_THAT(comm_->AllGatherStrings(std::string(1000, 'q'), {"names"}),
              IsOkAndHolds(ElementsAre(std::string(1000, 'q'))));
  TESSERA_EXPECT_OK(comm_->AgreeOk(absl::OkStatus(), "step"));
  EXPECT_EQ(comm_->AgreeOk(absl::NotFoundError("mine"), "step"),
            absl::NotFoundError("mine"));
  TESSERA_EXPECT_OK(comm_->Barrier("end"));
  comm_->Announce(absl::InternalError("x"));
  EXPECT_TRUE(comm_->AllAnnounced(absl::ZeroDuration()));
  comm_->ClearAnnouncement();
}

TEST_F(SelfTest, SplitsIntoItself) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto subgroup,
                               comm_->Split(7, {"subgroup"}));
  EXPECT_EQ(subgroup->world_size(), 1);
  EXPECT_EQ(subgroup->backend(), "self");
  EXPECT_THAT(subgroup->AgreeOk(absl::OkStatus(), "here"), IsOk());
}

TEST_F(SelfTest, RefusesWrongArgumentsAndStaysUsable) {
  const auto refused = [](const CommFuture& future, const char* words) {
    EXPECT_THAT(future.Wait(),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("tag"), HasSubstr(words))));
  };
  const at::Tensor a = torch::zeros({4});
  refused(comm_->AllGather(a, torch::zeros({5}), {"tag"}), "5 elements");
  refused(comm_->AllGather(a, torch::zeros({4}, torch::kDouble), {"tag"}),
          "dtype");
  refused(comm_->AllGather(at::Tensor(), a, {"tag"}), "undefined");
  refused(comm_->ReduceScatterSum(torch::zeros({2, 2}).t(), a, {"tag"}),
          "whole is not contiguous");
  refused(comm_->Broadcast(a, 1, {"tag"}), "root is 1");
  const at::Tensor two = torch::zeros({5});
  refused(comm_->AllGather(two.narrow(0, 1, 4), two.narrow(0, 0, 4), {"tag"}),
          "overlaps");
  TESSERA_EXPECT_OK(comm_->AllReduceSum(a, {"tag"}).Wait());
}

TEST(ParseRendezvousTest, Forms) {
  TESSERA_ASSERT_OK_AND_ASSIGN(RendezvousPlace place,
                               ParseRendezvous("tcp://node-7:29511"));
  EXPECT_EQ(place.host, "node-7");
  EXPECT_EQ(place.port, 29511);
  TESSERA_ASSERT_OK_AND_ASSIGN(place, ParseRendezvous("tcp://::1:80"));
  EXPECT_EQ(place.host, "::1");
  TESSERA_ASSERT_OK_AND_ASSIGN(place, ParseRendezvous("file:///tmp/a b"));
  EXPECT_EQ(place.path, "/tmp/a b");
  for (const char* wrong :
       {"", "tcp://", "tcp://host", "tcp://:80", "tcp://h:0", "tcp://h:65536",
        "tcp://h:x", "file://tmp/x", "http://h:1", "h:1"}) {
    EXPECT_THAT(ParseRendezvous(wrong),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("expected env://")))
        << wrong;
  }
}

struct Static {
  ~Static() { std::fputs("destroyed", stderr); }
};

[[noreturn]] void ExitBesideALeftThread() {
  static const Static destroyed;
  (void)RunAbandonable(
      []() -> absl::Status {
        absl::Notification().WaitForNotification();
        return absl::OkStatus();
      },
      [] { return absl::AbortedError("left"); });
  std::exit(3);
}

TEST(RunAbandonableTest, StaticsOutliveAThreadThatIsLeft) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(ExitBesideALeftThread(), testing::ExitedWithCode(3), "^$");
}

TEST(RunAbandonableTest, ReturnsResultOrStops) {
  const auto never = [] { return absl::OkStatus(); };
  EXPECT_THAT(RunAbandonable([] { return absl::AbortedError("x"); }, never),
              StatusIs(absl::StatusCode::kAborted));
  auto release = std::make_shared<absl::Notification>();
  EXPECT_THAT(RunAbandonable(
                  [release] {
                    release->WaitForNotification();
                    return absl::OkStatus();
                  },
                  [] { return absl::DeadlineExceededError("late"); }),
              StatusIs(absl::StatusCode::kDeadlineExceeded));
  release->Notify();
}

TEST(StartFailureTest, IsAddedToWhatATransportSays) {
  auto hash = c10::make_intrusive<c10d::HashStore>();
  c10d::Store& store = *hash;
  const absl::Status internal = absl::InternalError("cannot connect");
  EXPECT_EQ(WithStartFailure(internal, store), internal);
  store.set("failure", "14 rank 1 was killed");
  EXPECT_EQ(WithStartFailure(internal, store),
            absl::UnavailableError("rank 1 was killed; here: cannot connect"));
  EXPECT_EQ(
      WithStartFailure(absl::UnavailableError("rank 0 has ended"), store),
      absl::UnavailableError("rank 1 was killed; here: rank 0 has ended"));
  const absl::Status known =
      absl::UnavailableError("rank 2 failed: rank 1 was killed");
  EXPECT_EQ(WithStartFailure(known, store), known);
  const absl::Status ours = absl::InvalidArgumentError("ours");
  EXPECT_EQ(WithStartFailure(ours, store), ours);
}

// Its host has gone.
class LostStore : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  bool check(const std::vector<std::string>& keys) override {
    C10_THROW_ERROR(DistStoreError, "nobody listens there");
  }
};

TEST(StartFailureTest, ARankThatHadTheStoreIsNamedWithoutIt) {
  LostStore store("job", c10::make_intrusive<c10d::HashStore>());
  const absl::Status named = absl::UnavailableError("rank 0 has ended");
  EXPECT_EQ(WithStartFailure(named, store), named);
  EXPECT_THAT(WithStartFailure(absl::InternalError("cannot connect"), store),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr(kStoreError),
                             HasSubstr("here: cannot connect"))));
}

// Blocking in it fails; clones of it are plain.
class NonBlockingStore : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    throw std::runtime_error("blocks in the caller's store");
  }
  std::vector<uint8_t> get(const std::string& key) override {
    throw std::runtime_error("blocks in the caller's store");
  }
};

// Init asks the store meanwhile why the start has failed. Rank 1 is played.
TEST(MakeGroupTest, RanksMeetInAClientOfTheirOwn) {
  auto store = c10::make_intrusive<NonBlockingStore>(
      "job", c10::make_intrusive<c10d::HashStore>());
  store->set("shm/name/1", "");
  store->set("shm/verdict/1", "no memory");
  GroupPlan plan;
  plan.infos.resize(2);
  plan.backend = "shm";
  EXPECT_THAT(MakeGroup(plan, store, store).status(),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("[rank 1] no memory")));
  // There before the ranks meet: who reads it blocks in the caller's store.
  EXPECT_TRUE(store->check({"posted/0", "waiting/0"}));
}

TEST(InitTest, AWorldOfOneAndAgain) {
  for (const char* name : {"RANK", "WORLD_SIZE"}) unsetenv(name);
  std::string flag = "--world=1";
  std::string prog = "prog";
  for (int round = 0; round < 2; ++round) {
    char* argv[] = {prog.data(), flag.data(), nullptr};
    int argc = 2;
    EXPECT_EQ(World::Current(), nullptr);
    TESSERA_ASSERT_OK_AND_ASSIGN(const World* world, Init(&argc, argv));
    EXPECT_EQ(argc, 1);
    EXPECT_EQ(World::Current(), world);
    EXPECT_EQ(world->world_size(), 1);
    EXPECT_EQ(world->local_world_size(), 1);
    EXPECT_THAT(Init(&argc, argv),
                StatusIs(absl::StatusCode::kFailedPrecondition));
    TESSERA_EXPECT_OK(world->communicator()->Barrier("x"));
    Shutdown();
  }
}

}  // namespace
}  // namespace tessera
