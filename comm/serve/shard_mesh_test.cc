// Who is connected by a rank, whose one peer is played by the test.
#include "comm/serve/shard_mesh.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "base/thread/deadline.h"
#include "comm/connect/handshake.h"
#include "comm/connect/job_secret.h"
#include "comm/connect/sockets.h"
#include "comm/fake_communicator_test_util.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

// Rank 0 of two. Rank 1 says what rank 0 says, but listens for itself.
class Group : public FakeCommunicator {
 public:
  Group() : FakeCommunicator(/*rank=*/0, /*world_size=*/2) {
    texts = [this](const std::string& own) { return TextsOf(own); };
  }
  ~Group() override {
    if (listener_.fd >= 0) close(listener_.fd);
  }
  // Where rank 0 listens, once it does.
  Endpoint AwaitRank0() {
    listens_.WaitForNotification();
    return rank0_;
  }
  int listen_fd() const { return listener_.fd; }
  const std::string& token() const { return listener_.token; }

 private:
  std::vector<std::string> TextsOf(const std::string& own) {
    if (++calls_ != 2) return {own, own};
    const std::vector<std::string> words = absl::StrSplit(own, ' ');
    const std::string& network = words.at(2);
    rank0_ = ParseEndpoint(own, network);
    listener_ = Listen(/*loopback=*/true, 4, network);
    listens_.Notify();
    return {own, listener_.where};
  }

  int calls_ = 0;
  Listener listener_;
  Endpoint rank0_;
  absl::Notification listens_;
};

bool Await(int fd) { return WaitForSocket(fd, POLLIN, /*timeout_ms=*/20000); }

// Says who it is, and does not wait for the answer.
void GiveUp(const Endpoint& endpoint, int rank) {
  const int fd = ConnectTo("127.0.0.1", endpoint.port);
  ASSERT_GE(fd, 0);
  ASSERT_FALSE(Introduce(fd, JobKey("shards", endpoint.token), rank,
                         Deadline::After(absl::ZeroDuration()))
                   .ok());
  close(fd);
}

// The descriptor of the rank that comes, once it is let in.
int LetIn(int listen_fd, const std::string& token) {
  const std::string key = JobKey("shards", token);
  Greeting greeting(key, 1, 2);
  if (!Await(listen_fd)) return -1;
  const int fd = accept(listen_fd, nullptr, nullptr);
  while (!greeting.there()) {
    std::string bytes(greeting.wanted(), 0), answer;
    const ssize_t got = recv(fd, &bytes[0], bytes.size(), 0);
    if (got <= 0 || !greeting.Take(bytes.substr(0, got), &answer)) break;
    (void)send(fd, answer.data(), answer.size(), MSG_NOSIGNAL);
  }
  EXPECT_EQ(greeting.rank(), 0);
  return fd;
}

TEST(ShardMeshTest, APeerThatGaveUpMayComeAgain) {
  Group group;
  absl::StatusOr<std::unique_ptr<ShardMesh>> mesh;
  std::thread connects([&] {
    ShardMeshOptions options;
    options.trouble = [] { return absl::OkStatus(); };
    mesh = ConnectShardMesh(group, options, {"shards"});
  });
  const Endpoint rank0 = group.AwaitRank0();
  GiveUp(rank0, 1);
  // Rank 0's own connection.
  const int serve = LetIn(group.listen_fd(), group.token());
  const int ask = ConnectAs(1, rank0, "shards");
  EXPECT_GE(ask, 0);
  connects.join();
  TESSERA_ASSERT_OK(mesh.status());
  EXPECT_EQ(send((*mesh)->serve[1], "!", 1, MSG_NOSIGNAL), 1);
  char byte = 0;
  EXPECT_TRUE(ask >= 0 && Await(ask) && recv(ask, &byte, 1, 0) == 1);
  EXPECT_EQ(byte, '!');
  close(serve);
  if (ask >= 0) close(ask);
}

}  // namespace
}  // namespace tessera
