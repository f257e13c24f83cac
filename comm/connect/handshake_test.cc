// Who is let in by a process that listens, and whom a rank believes.
#include "comm/connect/handshake.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/thread/deadline.h"
#include "comm/connect/job_secret.h"
#include "comm/connect/keyed_hash.h"
#include "comm/connect/reception.h"
#include "comm/connect/sockets.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kEnough = absl::Seconds(20);
constexpr char kKey[] = "the key of this job";

// Listens at `address`, on the loopback; -1 if it cannot.
int ListenAt(const char* address, uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_port = htons(port);
  inet_pton(AF_INET, address, &at.sin_addr);
  if (bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0 &&
      listen(fd, 4) == 0) {
    return fd;
  }
  close(fd);
  return -1;
}

// What both ends have sent, in turns.
struct Conversation {
  std::vector<std::string> connecting, listening;
};

class HandshakeTest : public testing::Test {
 protected:
  HandshakeTest() { EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds_), 0); }
  ~HandshakeTest() override {
    for (int fd : fds_) {
      if (fd >= 0) close(fd);
    }
  }

  // Introduces `rank` at one end; the other end's bytes go through `greeting`
  // one by one, and what it answers through `change`.
  absl::Status Meet(
      int rank, absl::string_view key, Greeting* greeting,
      const std::function<void(std::string*)>& change = [](std::string*) {},
      absl::Duration patience = kEnough) {
    absl::Status status;
    std::thread connects([&] {
      status = Introduce(fds_[0], key, rank, Deadline::After(patience));
      shutdown(fds_[0], SHUT_WR);
    });
    char byte = 0;
    while (recv(fds_[1], &byte, 1, 0) == 1) {
      Note(&talk_.connecting, {&byte, 1});
      std::string answer;
      if (!greeting->Take({&byte, 1}, &answer)) break;
      change(&answer);
      if (!answer.empty()) {
        talk_.listening.push_back(answer);
        talk_.connecting.emplace_back();
      }
      if (send(fds_[1], answer.data(), answer.size(), MSG_NOSIGNAL) < 0) break;
    }
    shutdown(fds_[1], SHUT_RDWR);
    connects.join();
    return status;
  }

  static void Note(std::vector<std::string>* said, absl::string_view bytes) {
    if (said->empty()) said->emplace_back();
    absl::StrAppend(&said->back(), bytes);
  }

  Conversation talk_;
  int fds_[2] = {-1, -1};
};

TEST_F(HandshakeTest, RanksThatKnowTheKeyAreLetIn) {
  Greeting greeting(kKey, /*own=*/1, /*world_size=*/4);
  EXPECT_TRUE(Meet(3, kKey, &greeting).ok());
  EXPECT_TRUE(greeting.there());
  EXPECT_EQ(greeting.rank(), 3);
  EXPECT_EQ(greeting.wanted(), 0u);
  EXPECT_THAT(talk_.connecting, testing::SizeIs(3));
  for (const auto& part : {talk_.connecting, talk_.listening}) {
    for (const std::string& bytes : part) {
      EXPECT_THAT(bytes, testing::Not(HasSubstr(kKey))) << "it was sent";
    }
  }
}

TEST_F(HandshakeTest, OthersAreNot) {
  Greeting greeting(kKey, 1, 4);
  EXPECT_EQ(Meet(3, "another key", &greeting).code(),
            absl::StatusCode::kPermissionDenied)
      << "the one that listens does not know this job";
  EXPECT_FALSE(greeting.proven());
  for (int rank : {-1, 1, 4, 1 << 30}) {
    Greeting other(kKey, 1, 4);
    int fds[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    std::thread gives_up([&] {
      EXPECT_FALSE(
          Introduce(fds[0], kKey, rank, Deadline::After(kEnough)).ok());
    });
    std::string hello(other.wanted(), 0), answer;
    EXPECT_EQ(recv(fds[1], &hello[0], hello.size(), MSG_WAITALL),
              static_cast<ssize_t>(hello.size()));
    EXPECT_FALSE(other.Take(hello, &answer)) << rank;
    EXPECT_THAT(answer, IsEmpty());
    close(fds[1]);
    gives_up.join();
    close(fds[0]);
  }
}

// Somebody who does not know the key, and answers as one who does.
TEST_F(HandshakeTest, WhoListensMustKnowTheKeyToo) {
  Greeting impostor("another key", 0, 4);
  EXPECT_EQ(Meet(3, kKey, &impostor).code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(talk_.connecting, ElementsAre(testing::SizeIs(28), IsEmpty()))
      << "it has got more than a hello";
}

TEST_F(HandshakeTest, AChangedBitIsNoticed) {
  for (size_t at : {0u, 15u, 16u, 47u}) {
    SCOPED_TRACE(at);
    int fds[2] = {fds_[0], fds_[1]};
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds_), 0);
    for (int fd : fds) close(fd);
    Greeting greeting(kKey, 0, 4);
    EXPECT_EQ(Meet(3, kKey, &greeting,
                   [&](std::string* answer) {
                     if (answer->size() > at) (*answer)[at] ^= 1;
                   })
                  .code(),
              absl::StatusCode::kPermissionDenied);
    EXPECT_FALSE(greeting.proven());
  }
}

// What somebody has heard of a conversation is of no use in another.
TEST_F(HandshakeTest, ARepeatedConversationIsTurnedAway) {
  Greeting greeting(kKey, 0, 4);
  ASSERT_TRUE(Meet(3, kKey, &greeting).ok());
  Greeting again(kKey, 0, 4);
  std::string answer;
  EXPECT_TRUE(again.Take(talk_.connecting[0], &answer));
  EXPECT_NE(answer, talk_.listening[0]);
  EXPECT_FALSE(again.Take(talk_.connecting[1], &answer));
  EXPECT_FALSE(again.proven());
  // Nor what this end itself says.
  Greeting mirror(kKey, 0, 4);
  answer.clear();
  EXPECT_TRUE(mirror.Take(talk_.connecting[0], &answer));
  EXPECT_FALSE(mirror.Take(answer.substr(answer.size() - 32), &answer));
}

TEST_F(HandshakeTest, ItWantsNoByteTooMany) {
  Greeting greeting(kKey, 0, 4);
  std::string answer;
  EXPECT_FALSE(greeting.Take(std::string(greeting.wanted() + 1, 'x'), &answer));
}

// One that gave up waiting for the last answer is nobody.
TEST_F(HandshakeTest, WhoHasNotTakenTheLastAnswerIsNotThere) {
  Greeting greeting(kKey, 0, 4);
  EXPECT_EQ(Meet(
                3, kKey, &greeting,
                [](std::string* answer) {
                  if (answer->size() == 1) answer->clear();
                },
                absl::Milliseconds(200))
                .code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(greeting.proven());
  EXPECT_FALSE(greeting.there());
}

TEST(EndpointTest, ConnectsOnlyWhereItIsLetIn) {
  const Listener listener = Listen(/*loopback=*/true, 4, "here");
  ASSERT_GE(listener.fd, 0);
  const Endpoint endpoint = ParseEndpoint(listener.where, "here");
  EXPECT_EQ(endpoint.token, listener.token);
  Reception::Options options;
  options.key = JobKey("test", listener.token);
  options.world_size = options.at_once = 3;
  int connected = -1;
  for (const char* purpose : {"test", "another"}) {
    Reception reception(listener.fd, options);
    bool done = false;
    std::vector<Guest> guests;
    std::thread connects([&] { connected = ConnectAs(2, endpoint, purpose); });
    const bool right = std::string(purpose) == "test";
    const Deadline deadline = Deadline::After(kEnough);
    while (!done && !deadline.HasPassed()) {
      std::vector<pollfd> fds;
      reception.AddTo(&fds);
      poll(fds.data(), fds.size(), 20);
      const bool more = fds.size() > 1;
      for (const Guest& guest : reception.Look(fds.data())) {
        guests.push_back(guest);
      }
      fds.clear();
      reception.AddTo(&fds);
      // The other has come, and gone again.
      done = right ? !guests.empty() : more && fds.size() == 1;
    }
    connects.join();
    EXPECT_TRUE(done);
    EXPECT_EQ(connected >= 0, right);
    ASSERT_EQ(guests.size(), right ? 1u : 0u);
    if (right) {
      EXPECT_EQ(guests[0].rank, 2);
      close(guests[0].fd);
      close(connected);
    }
  }
  close(listener.fd);
  EXPECT_EQ(ConnectAs(2, endpoint, "test"), -1);
}

// As when a connection's first packet is lost: the first address answers
// nothing until the second has been tried, which turns the rank away.
TEST(EndpointTest, TriesAgainWhereNobodyAnswered) {
  uint16_t port = 0;
  const int slow = OpenListener(/*loopback=*/true, /*backlog=*/0, &port);
  ASSERT_GE(slow, 0);
  // Fill its queue, after which the kernel drops what comes.
  Endpoint endpoint = {RandomToken(), absl::StrCat(port), {"127.0.0.1"}};
  std::vector<int> queued;
  do {
    queued.push_back(ConnectTo("127.0.0.1", endpoint.port));
  } while (queued.back() >= 0);
  EXPECT_EQ(errno, ETIMEDOUT);
  const int other = ListenAt("127.0.0.2", port);
  ASSERT_GE(other, 0);
  endpoint.addresses.push_back("127.0.0.2");
  int connected = -1;
  std::thread connects([&] { connected = ConnectAs(2, endpoint, "test"); });
  EXPECT_TRUE(WaitForSocket(other, POLLIN, 60000));
  Reception::Options options;
  options.key = JobKey("test", endpoint.token);
  options.world_size = 3;
  options.at_once = 8;
  Reception reception(slow, options);
  close(accept(other, nullptr, nullptr));
  close(other);
  std::vector<Guest> guests;
  const Deadline deadline = Deadline::After(kEnough);
  while (guests.empty() && !deadline.HasPassed()) {
    std::vector<pollfd> fds;
    reception.AddTo(&fds);
    poll(fds.data(), fds.size(), 20);
    guests = reception.Look(fds.data());
  }
  connects.join();
  EXPECT_GE(connected, 0);
  ASSERT_EQ(guests.size(), 1u);
  EXPECT_EQ(guests[0].rank, 2);
  for (int fd : {slow, connected, guests[0].fd}) close(fd);
  for (int fd : queued) close(fd);
}

TEST(SocketsTest, WhoCameBeforeStaysWhenNoMoreAreTaken) {
  uint16_t port = 0;
  const int listener = OpenListener(/*loopback=*/true, 4, &port);
  ASSERT_GE(listener, 0);
  const int early = ConnectTo("127.0.0.1", absl::StrCat(port));
  ASSERT_GE(early, 0);
  ASSERT_TRUE(WaitForSocket(listener, POLLIN, 20000));
  const int taken = accept(listener, nullptr, nullptr);
  ASSERT_TRUE(TakeNoMore(listener));
  EXPECT_EQ(ConnectTo("127.0.0.1", absl::StrCat(port)), -1);
  EXPECT_EQ(errno, ETIMEDOUT);
  char byte = 0;
  EXPECT_EQ(send(early, "a", 1, 0), 1);
  EXPECT_EQ(recv(taken, &byte, 1, 0), 1);
  EXPECT_EQ(send(taken, "b", 1, 0), 1);
  ASSERT_TRUE(WaitForSocket(early, POLLIN, 20000));
  EXPECT_EQ(recv(early, &byte, 1, 0), 1);
  EXPECT_EQ(byte, 'b');
  for (int fd : {listener, early, taken}) close(fd);
}

TEST(EndpointTest, SaysWhereToTry) {
  const std::string token = RandomToken();
  const std::string where = absl::StrCat(token, " 4711 here 10.0.0.7 fd00::1");
  const Endpoint there = ParseEndpoint(where, "there");
  EXPECT_EQ(there.token, token);
  EXPECT_EQ(there.port, "4711");
  EXPECT_THAT(there.addresses, ElementsAre("10.0.0.7", "fd00::1"));
  EXPECT_THAT(ParseEndpoint(where, "here").addresses,
              ElementsAre("127.0.0.1", "10.0.0.7", "fd00::1"));
  EXPECT_THAT(ParseEndpoint("", "here").token, IsEmpty());
  EXPECT_THAT(ParseEndpoint("a 4711", "here").addresses, IsEmpty());
}

}  // namespace
}  // namespace tessera
