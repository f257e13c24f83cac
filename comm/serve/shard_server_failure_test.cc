// How pulls of shards fail, and what is left of a group whose pull has failed;
// in one process.
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "base/thread/no_threads_test_util.h"
#include "comm/serve/retired_servers.h"
#include "comm/serve/shard_server_testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// The group of rank 0 failed with `status`, and it has posted that.
void ExpectFailed(Ranks& ranks, const absl::Status& status) {
  EXPECT_EQ(ranks[0].failure(), status);
  EXPECT_EQ(ranks[0].server->Pull(0, 0, torch::zeros({6}), {"later"}).Wait(),
            status);
  const std::vector<Announcement> posted =
      ranks[1].domain->announcements().Read();
  ASSERT_EQ(posted.size(), 1u);
  EXPECT_TRUE(posted[0].final);
  EXPECT_THAT(posted[0].status.message(), HasSubstr(status.message()));
}

TEST(ShardServerTest, WithoutThreadsThereIsNoServer) {
  Ranks ranks(2);
  const NoThreads none;
  EXPECT_THAT(ranks.TryStart(0), StatusIs(absl::StatusCode::kResourceExhausted,
                                          HasSubstr("tessera-shards")));
}

// The rank that has no thread for it waits itself.
TEST(ShardServerTest, WithoutThreadsRetiringWaitsForThoseThatRead) {
  Ranks ranks(2);
  ranks.StartAll();
  ranks[1].server = nullptr;  // reads no more
  bool ended = false;
  const NoThreads none;
  RetireServer(
      std::move(ranks[0].server), [&] { ended = true; },
      /*patience=*/absl::ZeroDuration());
  EXPECT_TRUE(ended);
}

TEST(ShardServerTest, APastVersionIsAnErrorOfWhoAsks) {
  Ranks ranks(2);
  ranks.StartAll();
  for (int r : {0, 1}) ranks[r].server->Offer(3, torch::zeros({1}));
  ranks[0].server->SetVersion(8);
  ranks[1].server->SetVersion(9);
  const absl::Status status =
      ranks[0].server->Pull(3, 8, torch::zeros({2}), {"unit a"}).Wait();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kInternal,
                               AllOf(HasSubstr("unit a #1 (pull, 4 bytes of "
                                               "float32): rank 1 is at "
                                               "version 9"),
                                     HasSubstr("asked for version 8"))));
  ExpectFailed(ranks, status);
  TESSERA_EXPECT_OK(ranks[1].failure());
}

TEST(ShardServerTest, AnotherSizeIsAnErrorNamingBoth) {
  for (int owner : {0, 1}) {
    Ranks ranks(2);
    ranks.StartAll();
    for (int r = 0; r < 2; ++r) {
      ranks[r].server->Offer(3, torch::zeros({r == owner ? 25 : 24}));
      ranks[r].server->SetVersion(0);
    }
    const absl::Status status =
        ranks[0].server->Pull(3, 0, torch::zeros({48}), {"unit a"}).Wait();
    EXPECT_THAT(status,
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("unit a"),
                               HasSubstr(absl::StrCat("rank ", owner)),
                               HasSubstr("100 bytes"), HasSubstr("have 96"))));
    ExpectFailed(ranks, status);
  }
}

TEST(ShardServerTest, ATimeoutNamesWhoIsMissing) {
  Ranks ranks(3, absl::Milliseconds(300));
  ranks.StartAll();
  for (int r : {0, 1}) {
    ranks[r].server->Offer(3, torch::zeros({4}));
    ranks[r].server->SetVersion(2);
  }
  const absl::Time begin = absl::Now();
  const absl::Status status =
      ranks[0].server->Pull(3, 2, torch::zeros({12}), {"unit a"}).Wait();
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(300));
  EXPECT_THAT(
      status,
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               AllOf(HasSubstr("unit a #1 (pull, 32 bytes of float32) has not "
                               "ended within 300ms: rank 2 has not sent its "
                               "shard 3 of version 2 ("),
                     Not(HasSubstr("rank 1")))));
  ExpectFailed(ranks, status);
}

TEST(ShardServerTest, ATimeoutOfTheOwnPartSaysSo) {
  Ranks ranks(2, absl::Milliseconds(200));
  ranks.StartAll();
  ranks[1].server->Offer(3, torch::zeros({4}));
  ranks[1].server->SetVersion(2);
  EXPECT_THAT(ranks[0].server->Pull(3, 2, torch::zeros({8}), {"unit"}).Wait(),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("this rank, 0, has itself no shard 3")));
}

TEST(ShardServerTest, AnnouncementsEndPullsAfterTheGrace) {
  Ranks ranks(3, absl::Seconds(60), absl::Milliseconds(400));
  ranks.StartAll();
  const CommFuture future =
      ranks[0].server->Pull(0, 0, torch::zeros({3}), {"unit"});
  const absl::Time begin = absl::Now();
  ranks[2].domain->Announce(absl::DataLossError("bad sector"));
  EXPECT_THAT(future.Wait(), StatusIs(absl::StatusCode::kUnavailable,
                                      "rank 2 failed: bad sector"));
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(400));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(5));
}

TEST(ShardServerTest, AFinalAnnouncementOrAFailureHereEndsPullsSoon) {
  for (bool here : {false, true}) {
    Ranks ranks(2);
    ranks.StartAll();
    const CommFuture future =
        ranks[0].server->Pull(0, 0, torch::zeros({2}), {"unit"});
    const absl::Status status = absl::UnavailableError("the cable");
    if (here) {
      ranks[0].domain->failure()->Set(status);
    } else {
      ranks[1].domain->announcements().Post(status, /*final=*/true);
    }
    const absl::Time begin = absl::Now();
    EXPECT_EQ(future.Wait(), status);
    EXPECT_LT(absl::Now() - begin, absl::Seconds(3));
  }
}

TEST(ShardServerTest, DestructionEndsPullsHereAndThere) {
  Ranks ranks(3);
  ranks.StartAll();
  ranks[0].server->SetVersion(0);
  const CommFuture here =
      ranks[2].server->Pull(0, 0, torch::zeros({3}), {"unit h"});
  const CommFuture there =
      ranks[1].server->Pull(0, 0, torch::zeros({3}), {"unit t"});
  ranks[2].server = nullptr;
  EXPECT_THAT(here.Wait(), StatusIs(absl::StatusCode::kCancelled));
  TESSERA_EXPECT_OK(ranks[2].failure());
  EXPECT_THAT(there.Wait(),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr("unit t"),
                             HasSubstr("rank 2 no longer serves its shards"))));
  EXPECT_FALSE(ranks[1].failure().ok());
}

// Rank 2 is destroyed while large answers are on their way, both ways.
TEST(ShardServerTest, DestructionInTheMiddleOfPayloads) {
  for (size_t ended : {0, 1, 2, 3, 4}) {  // pulls of rank 0
    Ranks ranks(3);
    ranks.StartAll();
    const int64_t numel = 4 << 20;
    for (int r = 0; r < 3; ++r) {
      ranks[r].server->Offer(0, torch::full({numel}, r, at::kByte));
      ranks[r].server->SetVersion(0);
    }
    std::vector<CommFuture> futures[3];
    for (int i = 0; i < 4; ++i) {
      for (int r = 0; r < 3; ++r) {
        futures[r].push_back(ranks[r].server->Pull(
            0, 0, torch::zeros({3 * numel}, at::kByte), {"unit"}));
      }
    }
    for (size_t i = 0; i < ended; ++i) (void)futures[0][i].Wait();
    ranks[2].server = nullptr;
    for (int r = 0; r < 3; ++r) {
      for (const CommFuture& future : futures[r]) {
        const absl::Status status = future.Wait();
        if (status.ok()) continue;
        EXPECT_EQ(status.code(), r == 2 ? absl::StatusCode::kCancelled
                                        : absl::StatusCode::kUnavailable);
      }
    }
  }
}

// ---- a peer that is not one of ours ----

TEST(ShardServerTest, StrangeAnswersAreErrors) {
  for (const ShardAnswer answer :
       {ShardAnswer{1, 0, 5}, ShardAnswer{1, 0, -3}, ShardAnswer{1, 3, 1 << 30},
        ShardAnswer{1, int64_t{1} << 32, 0}, ShardAnswer{1, -1, 0},
        ShardAnswer{99, 0, INT64_MAX}}) {
    Ranks ranks(2);
    const int peer = std::exchange(ranks.mesh(1).serve[0], -1);
    ranks.Start(0);
    ranks[0].server->SetVersion(0);
    ranks[0].server->Offer(0, torch::zeros({1}));
    const CommFuture future =
        ranks[0].server->Pull(0, 0, torch::zeros({2}), {"unit"});
    ASSERT_EQ(send(peer, &answer, sizeof(answer), MSG_NOSIGNAL),
              static_cast<ssize_t>(sizeof(answer)));
    EXPECT_FALSE(future.Wait().ok());
    close(peer);
  }
}

// One answer of each of the other ranks ends the pull, not two of one.
TEST(ShardServerTest, ASecondAnswerIsAnError) {
  Ranks ranks(3);
  const int peer = std::exchange(ranks.mesh(1).serve[0], -1);
  ranks.Start(0);
  ranks[0].server->SetVersion(0);
  ranks[0].server->Offer(0, torch::zeros({1}));
  const CommFuture future =
      ranks[0].server->Pull(0, 0, torch::zeros({3}), {"unit a"});
  const struct {
    ShardAnswer header;
    float payload;
  } __attribute__((packed)) answers[] = {{{1, 0, 4}, 7}, {{1, 0, 4}, 7}};
  ASSERT_EQ(send(peer, answers, sizeof(answers), MSG_NOSIGNAL),
            static_cast<ssize_t>(sizeof(answers)));
  const absl::Status status = future.Wait();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kInternal,
                               AllOf(HasSubstr("unit a"),
                                     HasSubstr("rank 1 answered twice"))));
  EXPECT_EQ(ranks[0].failure(), status);
  close(peer);
}

// Sends `bytes`, and reads nothing; true once the other end has closed.
bool IsClosed(int fd, absl::string_view bytes) {
  while (true) {
    pollfd waiting = {fd, 0, 0};
    if (!bytes.empty()) waiting.events = POLLOUT;
    if (poll(&waiting, 1, /*timeout_ms=*/5000) <= 0) return false;
    if ((waiting.revents & (POLLHUP | POLLERR)) != 0) return true;
    const ssize_t sent =
        send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) return true;
    if (sent > 0) bytes.remove_prefix(sent);
  }
}

// What must be kept for who asks has a limit.
TEST(ShardServerTest, WhoAsksWithoutEndIsClosed) {
  constexpr size_t kRequests = 100000;
  for (const int64_t version : {0, 5}) {  // there already, and too early
    Ranks ranks(2);
    const int peer = std::exchange(ranks.mesh(1).ask[0], -1);
    ranks.Start(0);
    ranks[0].server->Offer(3, torch::zeros({1 << 10}));
    ranks[0].server->SetVersion(0);
    const std::vector<ShardRequest> requests(kRequests, {1, 3, version, 4096});
    EXPECT_TRUE(IsClosed(
        peer, absl::string_view(reinterpret_cast<const char*>(requests.data()),
                                kRequests * sizeof(ShardRequest))));
    TESSERA_EXPECT_OK(ranks[0].failure());
    close(peer);
  }
}

TEST(ShardServerTest, AnswersToNoQuestionAreThrownAway) {
  Ranks ranks(2);
  const int peer = std::exchange(ranks.mesh(1).serve[0], -1);
  ranks.Start(0);
  ranks[0].server->SetVersion(0);
  ranks[0].server->Offer(0, torch::ones({1}));
  at::Tensor whole = torch::zeros({2});
  const CommFuture future = ranks[0].server->Pull(0, 0, whole, {"unit"});
  std::string bytes;
  const auto answer = [&](int64_t ticket, const std::string& payload) {
    const ShardAnswer header = {ticket, 0,
                                static_cast<int64_t>(payload.size())};
    bytes.append(reinterpret_cast<const char*>(&header), sizeof(header));
    bytes.append(payload);
  };
  const float seven = 7;
  answer(99, std::string(50000, 'x'));
  answer(1, std::string(reinterpret_cast<const char*>(&seven), sizeof(seven)));
  ASSERT_EQ(send(peer, bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  TESSERA_ASSERT_OK(future.Wait());
  EXPECT_EQ(whole[0].item<float>(), 1);
  EXPECT_EQ(whole[1].item<float>(), 7);
  close(peer);
}

}  // namespace
}  // namespace tessera
