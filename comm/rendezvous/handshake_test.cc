// Who is let in by a rank that listens.
#include "comm/rendezvous/handshake.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "comm/rendezvous/sockets.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::string HelloOf(const std::string& token, int32_t rank) {
  std::string hello = token;
  hello.append(reinterpret_cast<const char*>(&rank), sizeof(rank));
  return hello;
}

TEST(HandshakeTest, RanksWithTheTokenAreKnown) {
  const std::string token = RandomToken();
  ASSERT_EQ(token.size(), kTokenBytes);
  const auto rank_of = [&](const std::string& hello) {
    return RankOfHello(hello, token, /*own=*/1, /*world_size=*/4);
  };
  EXPECT_EQ(rank_of(HelloOf(token, 0)), 0);
  EXPECT_EQ(rank_of(HelloOf(token, 3)), 3);
  for (int32_t none : {-1, 1, 4, 1 << 30}) {
    EXPECT_EQ(rank_of(HelloOf(token, none)), -1) << none;
  }
  for (size_t i = 0; i < kTokenBytes; ++i) {
    std::string other = token;
    other[i] ^= 1;
    EXPECT_EQ(rank_of(HelloOf(other, 3)), -1) << i;
  }
  EXPECT_EQ(rank_of(""), -1);
  EXPECT_EQ(rank_of(HelloOf(token, 3).substr(1)), -1);
  // A rank that could not make a token lets nobody in.
  EXPECT_EQ(RankOfHello(HelloOf(std::string(kTokenBytes, 0), 3), "", 1, 4), -1);
}

// Takes one connection, reads its hello, and does with it what `answer` does.
template <typename Answer>
int ConnectTo(const Listener& listener, const Endpoint& endpoint,
              const Answer& answer) {
  std::thread accepts([&] {
    const int fd = accept(listener.fd, nullptr, nullptr);
    char hello[kHelloBytes];
    ASSERT_EQ(recv(fd, hello, sizeof(hello), MSG_WAITALL),
              static_cast<ssize_t>(kHelloBytes));
    answer(fd, absl::string_view(hello, sizeof(hello)));
    close(fd);
  });
  const int fd = ConnectAs(2, endpoint);
  accepts.join();
  return fd;
}

TEST(HandshakeTest, ConnectsOnlyWhereItIsAnswered) {
  const Listener listener = Listen(/*loopback=*/true, 4, "here");
  ASSERT_GE(listener.fd, 0);
  const Endpoint endpoint = ParseEndpoint(listener.where, "here");
  Greeting greeting;
  const int let_in =
      ConnectTo(listener, endpoint, [&](int fd, absl::string_view hello) {
        std::string in(hello);
        EXPECT_TRUE(Greet(fd, listener.token, 0, 3, &in, &greeting));
        EXPECT_FALSE(greeting.confirmed) << "it has not got the answer yet";
        in.resize(1);
        EXPECT_EQ(recv(fd, &in[0], 1, MSG_WAITALL), 1);
        EXPECT_TRUE(Greet(fd, listener.token, 0, 3, &in, &greeting));
      });
  EXPECT_GE(let_in, 0);
  EXPECT_EQ(greeting.rank, 2);
  EXPECT_TRUE(greeting.confirmed);
  close(let_in);
  EXPECT_EQ(ConnectTo(listener, endpoint, [](int, absl::string_view) {}), -1);
  EXPECT_EQ(ConnectTo(listener, endpoint,
                      [](int fd, absl::string_view) { send(fd, "x", 1, 0); }),
            -1);
  close(listener.fd);
  EXPECT_EQ(ConnectAs(2, endpoint), -1);
}

TEST(HandshakeTest, ItMayComeInPiecesOrWithWhatFollows) {
  int fds[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  const std::string token = RandomToken();
  const std::string all = HelloOf(token, 2) + "kwhat follows";
  for (size_t first = 0; first <= all.size(); ++first) {
    std::string in = all.substr(0, first);
    Greeting greeting;
    ASSERT_TRUE(Greet(fds[0], token, 0, 3, &in, &greeting));
    EXPECT_EQ(greeting.rank, first < kHelloBytes ? -1 : 2);
    EXPECT_EQ(greeting.confirmed, first > kHelloBytes);
    in += all.substr(first);
    ASSERT_TRUE(Greet(fds[0], token, 0, 3, &in, &greeting));
    EXPECT_TRUE(greeting.confirmed);
    EXPECT_EQ(in, "what follows");
  }
  std::string other = HelloOf(token, 2) + "x";
  Greeting greeting;
  EXPECT_FALSE(Greet(fds[0], token, 0, 3, &other, &greeting));
  EXPECT_FALSE(greeting.confirmed);
  close(fds[0]);
  close(fds[1]);
}

TEST(HandshakeTest, EndpointsSayWhereToTry) {
  const std::string where = absl::StrCat(std::string(kTokenBytes, 'a'),
                                         " 4711 here 10.0.0.7 fd00::1");
  const Endpoint there = ParseEndpoint(where, "there");
  EXPECT_EQ(there.token, std::string(kTokenBytes, 'a'));
  EXPECT_EQ(there.port, "4711");
  EXPECT_THAT(there.addresses, ElementsAre("10.0.0.7", "fd00::1"));
  EXPECT_THAT(ParseEndpoint(where, "here").addresses,
              ElementsAre("127.0.0.1", "10.0.0.7", "fd00::1"));
  EXPECT_THAT(ParseEndpoint("", "here").token, IsEmpty());
  EXPECT_THAT(ParseEndpoint("a 4711", "here").addresses, IsEmpty());
}

}  // namespace
}  // namespace tessera
