// Messages from one rank to one other (ShardServer::Post and Take), between
// ranks in one process. Pulls: shard_server_test.cc. Messages of a device:
// tests/comm/device_messages_test.cc.
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
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
using ::testing::Not;

constexpr absl::Duration kMoment = absl::Milliseconds(60);

// What `from` tells `to` as `key`.
at::Tensor Message(int from, int to, int64_t key, int64_t numel = 10,
                   at::ScalarType dtype = at::kFloat) {
  return torch::arange(numel, at::kLong)
      .add(41 * from + 17 * to + 5 * key)
      .remainder(113)
      .to(dtype);
}

CommFuture Take(Ranks& ranks, int from, int to, int64_t key,
                at::Tensor message) {
  return ranks[to].server->Take(from, key, std::move(message),
                                {absl::StrCat("stage ", to)});
}

void ExpectTaken(Ranks& ranks, int from, int to, int64_t key) {
  at::Tensor message = torch::zeros({10});
  TESSERA_EXPECT_OK(Take(ranks, from, to, key, message).Wait());
  EXPECT_TRUE(message.equal(Message(from, to, key)))
      << key << " from " << from << " to " << to;
}

// One whose memory tells when it is freed.
at::Tensor Watched(std::shared_ptr<absl::Notification> freed, int64_t bytes) {
  auto memory = std::make_shared<std::vector<char>>(bytes, 'x');
  return torch::from_blob(
      memory->data(), {bytes},
      [memory, freed = std::move(freed)](void*) { freed->Notify(); },
      at::kByte);
}

bool IsFreed(const std::shared_ptr<absl::Notification>& freed,
             absl::Duration timeout = absl::Seconds(20)) {
  return freed->WaitForNotificationWithTimeout(timeout);
}

// ---- what comes ----

TEST(ShardMessagesTest, ATakeMayComeBeforeThePost) {
  Ranks ranks(2);
  ranks.StartAll();
  at::Tensor message = torch::zeros({2, 5});  // of any shape
  const CommFuture taken = Take(ranks, 1, 0, 7, message);
  absl::SleepFor(kMoment);
  ranks[1].server->Post(0, 6, Message(1, 0, 6));
  absl::SleepFor(kMoment);
  EXPECT_FALSE(taken.Done());
  ranks[1].server->Post(0, 7, Message(1, 0, 7));
  TESSERA_ASSERT_OK(taken.Wait());
  EXPECT_TRUE(message.equal(Message(1, 0, 7).view({2, 5})));
  ExpectTaken(ranks, 1, 0, 6);
}

// Versions say nothing of messages.
TEST(ShardMessagesTest, APostMayComeBeforeTheTake) {
  Ranks ranks(2);
  ranks.StartAll();
  ranks[1].server->Post(0, 7, Message(1, 0, 7));
  ranks[1].server->SetVersion(5);
  absl::SleepFor(kMoment);
  ExpectTaken(ranks, 1, 0, 7);
}

TEST(ShardMessagesTest, EachKindHasItsBits) {
  Ranks ranks(2);
  ranks.StartAll();
  for (at::ScalarType dtype :
       {at::kByte, at::kLong, at::kBFloat16, at::kDouble, at::kComplexFloat}) {
    for (int64_t numel : {0, 1, 997, 100003}) {
      const at::Tensor sent = Message(0, 1, 3, numel, dtype);
      at::Tensor message = torch::zeros({numel}, dtype);
      ranks[0].server->Post(1, 3, sent);  // the key was taken
      TESSERA_ASSERT_OK(Take(ranks, 0, 1, 3, message).Wait());
      EXPECT_TRUE(message.equal(sent)) << c10::toString(dtype) << " " << numel;
    }
  }
}

// All post the same keys to all, themselves among them, and take them from the
// last to the first. Some are larger than what goes in one turn.
TEST(ShardMessagesTest, MessagesOfAllRanksCross) {
  constexpr int kWorld = 3, kKeys = 20;
  Ranks ranks(kWorld);
  ranks.StartAll();
  const auto numel = [](int64_t key) {
    return key % 9 == 0 ? (int64_t{1} << 20) + key : 100 * key;
  };
  const auto run = [&](int r) {
    std::vector<CommFuture> futures;
    std::vector<std::pair<at::Tensor, at::Tensor>> got_and_sent;
    for (int64_t key = kKeys - 1; key >= 0; --key) {
      for (int from = 0; from < kWorld; ++from) {
        at::Tensor message = torch::zeros({numel(key)});
        futures.push_back(Take(ranks, from, r, key, message));
        got_and_sent.emplace_back(message, Message(from, r, key, numel(key)));
      }
      // Half of what is posted comes after the takes of it.
      const int64_t posted = kKeys - 1 - key;
      for (int to = 0; to < kWorld; ++to) {
        ranks[r].server->Post(to, posted,
                              Message(r, to, posted, numel(posted)));
      }
    }
    for (size_t i = 0; i < futures.size(); ++i) {
      TESSERA_ASSERT_OK(futures[i].Wait());
      ASSERT_TRUE(got_and_sent[i].first.equal(got_and_sent[i].second)) << i;
    }
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < kWorld; ++r) threads.emplace_back(run, r);
  for (std::thread& thread : threads) thread.join();
}

TEST(ShardMessagesTest, OneKeyToTwoReceiversIsTwoMessages) {
  Ranks ranks(3);
  ranks.StartAll();
  at::Tensor early = torch::zeros({10});
  const CommFuture taken = Take(ranks, 0, 2, 4, early);
  ranks[0].server->Post(1, 4, Message(0, 1, 4));
  absl::SleepFor(kMoment);
  EXPECT_FALSE(taken.Done());
  ranks[0].server->Post(2, 4, Message(0, 2, 4));
  TESSERA_ASSERT_OK(taken.Wait());
  EXPECT_TRUE(early.equal(Message(0, 2, 4)));
  ExpectTaken(ranks, 0, 1, 4);
}

// Keys of messages and of shards are apart, and neither waits for the other.
TEST(ShardMessagesTest, PullsAndTakesOfOneKeyAreApart) {
  Ranks ranks(2);
  ranks.StartAll();
  at::Tensor whole = torch::zeros({20}), message = torch::zeros({10});
  const CommFuture pulled = ranks[0].server->Pull(3, 0, whole, {"unit"});
  const CommFuture taken = Take(ranks, 1, 0, 3, message);
  for (int r : {0, 1}) {
    ranks[r].server->Offer(3, torch::full({10}, r + 1.0f));
  }
  ranks[1].server->Post(0, 3, Message(1, 0, 3));
  TESSERA_ASSERT_OK(taken.Wait());
  EXPECT_FALSE(pulled.Done());
  for (int r : {0, 1}) ranks[r].server->SetVersion(0);
  TESSERA_ASSERT_OK(pulled.Wait());
  EXPECT_TRUE(message.equal(Message(1, 0, 3)));
  EXPECT_EQ(whole.sum().item<float>(), 30);
}

TEST(ShardMessagesTest, BadTakesAreRefusedAndFailNothing) {
  Ranks ranks(2);
  ranks.StartAll();
  const auto expect_refused = [&](int from, at::Tensor message,
                                  const std::string& why) {
    EXPECT_THAT(Take(ranks, from, 0, 5, std::move(message)).Wait(),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("stage 0"), HasSubstr(why))));
  };
  expect_refused(2, torch::zeros({10}), "rank 2 of 2");
  expect_refused(-1, torch::zeros({10}), "rank -1");
  expect_refused(1, at::Tensor(), "undefined");
  expect_refused(1, torch::zeros({2, 5}).t(), "not contiguous");
  at::Tensor message = torch::zeros({10});
  const CommFuture taken = Take(ranks, 1, 0, 5, message);
  expect_refused(1, torch::zeros({10}), "message 5 is being taken already");
  (void)Take(ranks, 0, 0, 5, torch::zeros({10}));  // that is another one
  ranks[1].server->Post(0, 5, Message(1, 0, 5));
  TESSERA_EXPECT_OK(taken.Wait());
  TESSERA_EXPECT_OK(ranks[0].failure());
}

TEST(ShardMessagesDeathTest, AMessageThatIsNotTakenIsNotReplaced) {
  EXPECT_DEATH(
      {
        Ranks ranks(2);
        ranks.StartAll();
        for (int i = 0; i < 2; ++i)
          ranks[0].server->Post(1, 8, Message(0, 1, 8));
      },
      "message 8 to rank 1 was posted before, and is not taken yet");
}

// ---- how long it is kept ----

TEST(ShardMessagesTest, AMessageIsKeptUntilItIsTaken) {
  Ranks ranks(2);
  ranks.StartAll();
  const auto freed = std::make_shared<absl::Notification>();
  ranks[1].server->Post(0, 0, Watched(freed, 4 << 20));
  EXPECT_FALSE(IsFreed(freed, kMoment));
  at::Tensor message = torch::zeros({4 << 20}, at::kByte);
  TESSERA_ASSERT_OK(Take(ranks, 1, 0, 0, message).Wait());
  EXPECT_TRUE(message.eq('x').all().item<bool>());
  EXPECT_TRUE(IsFreed(freed));
}

TEST(ShardMessagesTest, MessagesThatNobodyCanTakeAreDropped) {
  Ranks ranks(3);
  ranks.StartAll();
  const auto before = std::make_shared<absl::Notification>();
  const auto after = std::make_shared<absl::Notification>();
  const auto kept = std::make_shared<absl::Notification>();
  ranks[1].server->Post(0, 0, Watched(before, 10));
  ranks[1].server->Post(2, 0, Watched(kept, 10));
  const CommFuture retired = ranks[0].server->Retire();
  EXPECT_TRUE(IsFreed(before));
  ranks[1].server->Post(0, 0, Watched(after, 10));
  EXPECT_TRUE(IsFreed(after));
  EXPECT_FALSE(IsFreed(kept, kMoment));
  ranks[1].server = nullptr;
  EXPECT_TRUE(IsFreed(kept));
}

// ---- costs ----

TEST(ShardMessagesTest, TakesCountAsPullsOfOneRank) {
  Ranks ranks(3);
  ranks.StartAll();
  const CommFuture taken = Take(ranks, 2, 0, 0, torch::zeros({10}));
  EXPECT_THAT(ranks[0].records.ToText(),
              AllOf(HasSubstr("RUNNING"),
                    HasSubstr("pull, 40 bytes of float32  stage 0  comm/")));
  absl::SleepFor(kMoment);
  ranks[2].server->Post(0, 0, torch::zeros({10}));
  TESSERA_ASSERT_OK(taken.Wait());
  EXPECT_THAT(ranks[0].records.ToText(), HasSubstr("done"));
  EXPECT_THAT(ranks[0].costs.ToText("gloo"),
              ContainsRegex("pull +1 +40 .*stage 0"));
  const std::vector<absl::Duration> waits = ranks[0].costs.waits();
  EXPECT_EQ(waits[1], absl::ZeroDuration());
  EXPECT_GE(waits[2], kMoment);
}

// ---- failures ----

TEST(ShardMessagesTest, AnotherSizeIsAnErrorNamingBoth) {
  for (const int sender : {0, 1}) {  // to itself, too
    Ranks ranks(2);
    ranks.StartAll();
    ranks[sender].server->Post(0, 3, torch::zeros({25}));
    const absl::Status status =
        Take(ranks, sender, 0, 3, torch::zeros({24})).Wait();
    EXPECT_THAT(
        status,
        StatusIs(absl::StatusCode::kInvalidArgument,
                 AllOf(HasSubstr("stage 0"),
                       HasSubstr(absl::StrCat("message 3 of rank ", sender)),
                       HasSubstr("100 bytes"), HasSubstr("have 96"))));
    EXPECT_EQ(ranks[0].failure(), status);
    EXPECT_EQ(Take(ranks, 1, 0, 4, torch::zeros({1})).Wait(), status);
  }
}

TEST(ShardMessagesTest, ASenderThatEndsEndsTheTakesFromIt) {
  Ranks ranks(3);
  ranks.StartAll();
  const CommFuture other = Take(ranks, 1, 2, 0, torch::zeros({10}));
  const CommFuture there = Take(ranks, 1, 0, 0, torch::zeros({10}));
  at::Tensor message = torch::zeros({10});
  const CommFuture own = Take(ranks, 0, 1, 0, message);
  ranks[1].server = nullptr;
  EXPECT_THAT(own.Wait(), StatusIs(absl::StatusCode::kCancelled));
  TESSERA_EXPECT_OK(ranks[1].failure());
  EXPECT_THAT(there.Wait(),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr("(pull, 40 bytes"),
                             HasSubstr("rank 1 no longer serves its shards"))));
  EXPECT_THAT(other.Wait(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("rank 1")));
}

// One that left in an orderly way is missed by nobody who takes from others.
TEST(ShardMessagesTest, TakesGoOnWithoutRanksThatTheyDoNotNeed) {
  Ranks ranks(3);
  ranks.StartAll();
  ranks[2].server = nullptr;
  at::Tensor message = torch::zeros({10});
  const CommFuture taken = Take(ranks, 1, 0, 0, message);
  absl::SleepFor(absl::Seconds(1));  // longer than a closed connection is given
  EXPECT_FALSE(taken.Done());
  ranks[1].server->Post(0, 0, Message(1, 0, 0));
  TESSERA_EXPECT_OK(taken.Wait());
  TESSERA_EXPECT_OK(ranks[0].failure());
}

TEST(ShardMessagesTest, ATimeoutNamesTheSenderAlone) {
  Ranks ranks(3, absl::Milliseconds(300));
  ranks.StartAll();
  const absl::Status status = Take(ranks, 2, 0, 3, torch::zeros({10})).Wait();
  EXPECT_THAT(status,
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       AllOf(HasSubstr("stage 0 #1 (pull, 40 bytes of float32) "
                                       "has not ended within 300ms: rank 2 has "
                                       "not sent its message 3 ("),
                             Not(HasSubstr("rank 1")))));
  EXPECT_EQ(ranks[0].failure(), status);
}

TEST(ShardMessagesTest, AnAnnouncementEndsTakes) {
  Ranks ranks(3, absl::Seconds(60), absl::Milliseconds(400));
  ranks.StartAll();
  const CommFuture taken = Take(ranks, 1, 0, 0, torch::zeros({10}));
  ranks[1].domain->Announce(absl::DataLossError("bad sector"));
  EXPECT_THAT(taken.Wait(), StatusIs(absl::StatusCode::kUnavailable,
                                     "rank 1 failed: bad sector"));
}

TEST(ShardMessagesTest, ARetiredServerTakesNothingAndIsTakenFrom) {
  Ranks ranks(2);
  ranks.StartAll();
  const CommFuture under_way = Take(ranks, 1, 0, 0, torch::zeros({10}));
  ranks[0].server->Post(1, 0, Message(0, 1, 0));
  const CommFuture retired = ranks[0].server->Retire();
  EXPECT_THAT(under_way.Wait(), StatusIs(absl::StatusCode::kCancelled));
  EXPECT_THAT(Take(ranks, 1, 0, 1, torch::zeros({10})).Wait(),
              StatusIs(absl::StatusCode::kCancelled));
  ranks[0].server->Post(1, 1, Message(0, 1, 1));
  ExpectTaken(ranks, 0, 1, 1);
  ExpectTaken(ranks, 0, 1, 0);
  EXPECT_FALSE(retired.Done());
  ranks[1].server = nullptr;
  TESSERA_EXPECT_OK(retired.Wait());
  TESSERA_EXPECT_OK(ranks[0].failure());
}

}  // namespace
}  // namespace tessera
