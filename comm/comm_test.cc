// The communication thread, the world of one, and what needs no second rank.
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "base/status_matchers.h"
#include "comm/announcements.h"
#include "comm/comm_thread.h"
#include "comm/communicator.h"
#include "comm/rendezvous.h"
#include "comm/self_communicator.h"
#include "comm/wait_monitor.h"
#include "comm/world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
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

// Two ranks' boards over one store.
class BoardTest : public testing::Test {
 protected:
  std::unique_ptr<Announcements> Board(int rank) {
    return std::move(Announcements::Create(store_, rank, 2)).value();
  }
  c10::intrusive_ptr<c10d::Store> store_ =
      c10::make_intrusive<c10d::HashStore>();
  std::unique_ptr<Announcements> a_ = Board(0);
  std::unique_ptr<Announcements> b_ = Board(1);
};

TEST_F(BoardTest, SaysAndTakesBack) {
  EXPECT_THAT(a_->Read(), IsEmpty());
  b_->TakeBack();  // nothing to take back
  EXPECT_THAT(a_->Read(), IsEmpty());
  b_->Say(b_->FailedHere(absl::DataLossError("file gone, twice")), false);
  std::vector<Announcement> said = a_->Read();
  ASSERT_THAT(said, SizeIs(1));
  EXPECT_EQ(said[0].rank, 1);
  EXPECT_EQ(said[0].count, 1);
  EXPECT_FALSE(said[0].final);
  EXPECT_EQ(said[0].status,
            absl::UnavailableError("rank 1 failed: file gone, twice"));
  EXPECT_THAT(b_->Read(), IsEmpty());
  b_->TakeBack();
  EXPECT_THAT(a_->Read(), IsEmpty());
  b_->Say(absl::UnavailableError("again"), true);
  ASSERT_THAT(a_->Read(), SizeIs(1));
  EXPECT_EQ(a_->Read()[0].count, 2);
  b_->TakeBack();  // a final one stays
  EXPECT_THAT(a_->Read(), SizeIs(1));
}

TEST_F(BoardTest, AllSaid) {
  EXPECT_FALSE(a_->AllSaid(absl::ZeroDuration()));
  a_->Say(absl::InternalError("a"), false);
  EXPECT_FALSE(a_->AllSaid(absl::Milliseconds(20)));
  b_->Say(absl::InternalError("b"), false);
  EXPECT_TRUE(b_->AllSaid(absl::ZeroDuration()));
  b_->TakeBack();
  // b saw all and took its own back before a looked.
  EXPECT_TRUE(a_->AllSaid(absl::ZeroDuration()));
  a_->TakeBack();
  // The next time nothing of that counts.
  b_->Say(absl::InternalError("b"), false);
  EXPECT_FALSE(b_->AllSaid(absl::Milliseconds(20)));
}

class MonitorTest : public BoardTest {
 protected:
  // Waits, as a transport would, until the monitor aborts.
  absl::Status WaitUntilAborted(absl::Duration timeout, absl::Duration grace) {
    absl::Notification aborted;
    WaitMonitor monitor(a_.get(), {timeout, grace}, [&] { aborted.Notify(); });
    monitor.Begin({7, 1234, "all-gather of unit x"});
    aborted.WaitForNotification();
    return monitor.End(absl::CancelledError("aborted"));
  }
};

TEST_F(MonitorTest, TimeoutNamesTheCollectiveAndWhoWaitsWhere) {
  b_->SetWaiting({8, 99, "reduce-scatter of unit y"});
  EXPECT_THAT(
      WaitUntilAborted(absl::Milliseconds(200), absl::Seconds(60)),
      StatusIs(
          absl::StatusCode::kDeadlineExceeded,
          AllOf(HasSubstr("all-gather of unit x #7"), HasSubstr("200ms"),
                HasSubstr("rank 1 waits in reduce-scatter of unit y #8"))));
  // What failed here is final for the others.
  ASSERT_THAT(b_->Read(), SizeIs(1));
  EXPECT_TRUE(b_->Read()[0].final);
}

TEST_F(MonitorTest, DifferentCollectivesOfOneNumberAreNamedLongBefore) {
  b_->SetWaiting({7, 99, "reduce-scatter of unit y"});
  EXPECT_THAT(WaitUntilAborted(absl::Seconds(600), absl::Milliseconds(100)),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("in all-gather of unit x #7"),
                             HasSubstr("rank 1 in reduce-scatter of unit y"))));
}

TEST_F(MonitorTest, SoAreDifferentSizesOfOneCollective) {
  b_->SetWaiting({7, 99, "all-gather of unit x"});
  EXPECT_THAT(WaitUntilAborted(absl::Seconds(600), absl::Milliseconds(100)),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("#7 with another size or dtype")));
}

// Here the two are in different collectives because rank 1 has failed.
TEST_F(MonitorTest, WhatARankAnnouncedComesBeforeTheDifference) {
  b_->SetWaiting({7, 99, "agreement"});
  b_->Say(b_->FailedHere(absl::InternalError("no memory")), false);
  EXPECT_THAT(
      WaitUntilAborted(absl::Seconds(60), absl::Milliseconds(300)),
      StatusIs(absl::StatusCode::kUnavailable, "rank 1 failed: no memory"));
}

TEST_F(MonitorTest, AnAnnouncementEndsTheWaitAfterTheGrace) {
  b_->Say(b_->FailedHere(absl::InternalError("no memory")), false);
  const absl::Time begin = absl::Now();
  EXPECT_THAT(
      WaitUntilAborted(absl::Seconds(60), absl::Milliseconds(300)),
      StatusIs(absl::StatusCode::kUnavailable, "rank 1 failed: no memory"));
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(300));
}

TEST_F(MonitorTest, AFinalAnnouncementNeedsNoGrace) {
  b_->Say(absl::UnavailableError("rank 9 failed: far"), true);
  EXPECT_THAT(WaitUntilAborted(absl::Seconds(600), absl::Seconds(2)),
              StatusIs(absl::StatusCode::kUnavailable, "rank 9 failed: far"));
}

TEST_F(MonitorTest, WhatWasTakenBackIsNeverSeen) {
  b_->Say(b_->FailedHere(absl::InternalError("old")), false);
  b_->TakeBack();
  EXPECT_THAT(WaitUntilAborted(absl::Milliseconds(400), absl::Milliseconds(50)),
              StatusIs(absl::StatusCode::kDeadlineExceeded));
}

TEST_F(MonitorTest, AnOwnErrorIsToldToTheOthersAsThisRanks) {
  WaitMonitor monitor(a_.get(), {absl::Seconds(60), absl::Seconds(5)}, [] {});
  monitor.Begin({1, 1, "x"});
  EXPECT_THAT(monitor.End(absl::ResourceExhaustedError("no memory")),
              StatusIs(absl::StatusCode::kResourceExhausted, "no memory"));
  ASSERT_THAT(b_->Read(), SizeIs(1));
  EXPECT_EQ(b_->Read()[0].status,
            absl::UnavailableError("rank 0 failed: no memory"));
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
