// The job's store: what it answers, how long a client waits, who gets in.
#include "torch/csrc/distributed/c10d/Store.hpp"

#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "base/thread/deadline.h"
#include "comm/connect/sockets.h"
#include "comm/rendezvous/store_client.h"
#include "comm/rendezvous/store_messages.h"
#include "comm/rendezvous/store_server.h"
#include "comm/rendezvous/store_table.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

constexpr absl::Duration kEnough = absl::Seconds(20);
constexpr std::chrono::seconds kLong(20);

TEST(StoreMessagesTest, FramesMayComeInPieces) {
  const StoreMessage message = {"set", "", std::string("\0\n", 2)};
  const std::string frame = EncodeFrame(message);
  for (size_t first = 0; first < frame.size(); ++first) {
    std::string in = frame.substr(0, first);
    StoreMessage out;
    ASSERT_EQ(TakeFrame(&in, &out), Decoded::kIncomplete) << first;
    in += frame.substr(first) + "rest";
    ASSERT_EQ(TakeFrame(&in, &out), Decoded::kMessage);
    EXPECT_EQ(out, message);
    EXPECT_EQ(in, "rest");
  }
}

TEST(StoreMessagesTest, WhatIsNotAFrameIsNonsense) {
  StoreMessage out;
  const auto take = [&](std::string in) { return TakeFrame(&in, &out); };
  EXPECT_EQ(take("GET / HTTP/1.0\r\n"), Decoded::kNonsense) << "a large size";
  EXPECT_EQ(take(std::string(8, 0)), Decoded::kNonsense) << "nothing in it";
  const std::string frame = EncodeFrame({"set", "key", "value"});
  for (size_t i = 0; i < 4; ++i) {  // its size, and the count of fields
    for (size_t at : {i, i + 4}) {
      std::string other = frame;
      other[at] ^= 1;
      EXPECT_NE(take(other), Decoded::kMessage) << at;
    }
  }
}

class StoreTableTest : public testing::Test {
 protected:
  StoreMessage Ask(StoreMessage request) {
    const auto answers = table_.Handle(1, std::move(request));
    EXPECT_THAT(answers, testing::SizeIs(1));
    return answers.empty() ? StoreMessage{} : answers[0].second;
  }
  StoreTable table_;
};

TEST_F(StoreTableTest, KeepsValues) {
  EXPECT_THAT(Ask({"check", "a"}), ElementsAre("ok", "0"));
  EXPECT_THAT(Ask({"set", "a", "1"}), ElementsAre("ok"));
  EXPECT_THAT(Ask({"get", "a"}), ElementsAre("ok", "1"));
  EXPECT_THAT(Ask({"add", "a", "-3"}), ElementsAre("ok", "-2"));
  EXPECT_THAT(Ask({"add", "new", "0"}), ElementsAre("ok", "0"));
  EXPECT_THAT(Ask({"append", "a", "x"}), ElementsAre("ok"));
  EXPECT_THAT(Ask({"get", "a", "new"}), ElementsAre("ok", "-2x", "0"));
  EXPECT_THAT(Ask({"check", "a", "b"}), ElementsAre("ok", "0"));
  EXPECT_THAT(Ask({"count"}), ElementsAre("ok", "2"));
  EXPECT_THAT(Ask({"delete", "a"}), ElementsAre("ok", "1"));
  EXPECT_THAT(Ask({"delete", "a"}), ElementsAre("ok", "0"));
}

TEST_F(StoreTableTest, SwapsWhatIsExpected) {
  EXPECT_THAT(Ask({"swap", "a", "x", "1"}), ElementsAre("ok", "x"));
  EXPECT_THAT(Ask({"check", "a"}), ElementsAre("ok", "0"));
  EXPECT_THAT(Ask({"swap", "a", "", "1"}), ElementsAre("ok", "1"));
  EXPECT_THAT(Ask({"swap", "a", "", "2"}), ElementsAre("ok", "1"));
  EXPECT_THAT(Ask({"swap", "a", "1", "3"}), ElementsAre("ok", "3"));
}

TEST_F(StoreTableTest, WhoWaitsIsAnsweredWhenAllIsThere) {
  EXPECT_THAT(table_.Handle(7, {"get", "a", "b"}), IsEmpty());
  EXPECT_THAT(table_.Handle(8, {"wait", "b"}), IsEmpty());
  EXPECT_THAT(table_.Handle(9, {"wait", "b"}), IsEmpty());
  table_.Forget(9);
  EXPECT_THAT(table_.Handle(1, {"set", "a", "1"}),
              ElementsAre(Pair(1, ElementsAre("ok"))));
  EXPECT_THAT(table_.Handle(7, {"count"}),
              ElementsAre(Pair(7, ElementsAre("error", testing::_))));
  EXPECT_THAT(table_.Handle(1, {"add", "b", "2"}),
              UnorderedElementsAre(Pair(1, ElementsAre("ok", "2")),
                                   Pair(7, ElementsAre("ok", "1", "2")),
                                   Pair(8, ElementsAre("ok"))));
  EXPECT_THAT(table_.Handle(7, {"count"}),
              ElementsAre(Pair(7, ElementsAre("ok", "2"))));
}

TEST_F(StoreTableTest, WhatMakesNoSenseIsAnError) {
  Ask({"set", "text", "x"});
  Ask({"set", "large", "9223372036854775807"});
  for (const StoreMessage& request :
       std::vector<StoreMessage>{{"set", "a"},
                                 {"add", "a", "x"},
                                 {"add", "text", "1"},
                                 {"add", "large", "1"},
                                 {"nothing"},
                                 {"swap", "a"},
                                 {"count", "a"}}) {
    EXPECT_THAT(Ask(request), ElementsAre("error", testing::_)) << request[0];
  }
  EXPECT_THAT(Ask({"count"}), ElementsAre("ok", "2"));
}

class StoreServerTest : public testing::Test {
 protected:
  StoreServerTest() {
    StoreServer::Options server;
    server.loopback = true;
    server.world_size = 2;
    server.key = options_.key = "key";
    options_.host = "127.0.0.1";
    options_.server = StoreServer::Start(server).value();
    options_.port = options_.server->port();
  }
  c10::intrusive_ptr<c10d::Store> Connect() {
    return ConnectStore(options_, Deadline::After(kEnough)).value();
  }

  StoreClientOptions options_;
};

TEST_F(StoreServerTest, IsAStoreForTransports) {
  const auto a = Connect(), b = a->clone();
  a->set("k", "value");
  EXPECT_EQ(b->get_to_str("k"), "value");
  EXPECT_EQ(b->add("n", 2), 2);
  EXPECT_EQ(a->add("n", 3), 5);
  EXPECT_EQ(a->compareSet("k", "value", "next"), "next");
  EXPECT_TRUE(a->check({"k", "n"}));
  EXPECT_FALSE(a->check({"k", "none"}));
  a->multiSet({"x", "y"}, {{1}, {2}});
  a->append("x", {3});
  EXPECT_THAT(b->multiGet({"x", "y"}),
              ElementsAre(ElementsAre(1, 3), ElementsAre(2)));
  EXPECT_EQ(a->getNumKeys(), 4);
  EXPECT_TRUE(a->deleteKey("x"));
  EXPECT_FALSE(a->deleteKey("x"));
  // More than a socket holds, while the other waits for it.
  const std::string large(3 << 20, 'x');
  std::thread sets([&] { b->set("large", large); });
  EXPECT_EQ(a->get_to_str("large"), large);
  sets.join();
}

TEST_F(StoreServerTest, AWaitEndsWithItsTimeAndTheNextCallWorks) {
  const auto store = Connect();
  EXPECT_THROW(store->wait({"none"}, std::chrono::milliseconds(50)),
               c10::DistStoreError);
  store->setTimeout(std::chrono::milliseconds(50));
  EXPECT_THROW(store->get("none"), c10::DistStoreError);
  store->setTimeout(kLong);
  store->set("none", "1");
  EXPECT_EQ(store->get_to_str("none"), "1");
}

TEST_F(StoreServerTest, ItsEndIsAnError) {
  const auto store = Connect();
  const StoreClientOptions other = options_;
  store->set("k", "value");
  // The client keeps it while it is there, so a second one is closed.
  StoreServer::Options server;
  server.loopback = true;
  server.key = "key";
  auto second = StoreServer::Start(server).value();
  StoreClientOptions client;
  client.host = "127.0.0.1";
  client.port = second->port();
  client.key = "key";
  const auto lost = ConnectStore(client, Deadline::After(kEnough)).value();
  lost->setTimeout(kLong);
  lost->set("k", "value");
  second = nullptr;
  EXPECT_THROW(lost->get("k"), c10::DistStoreError);
  EXPECT_EQ(ConnectStore(client, Deadline::After(absl::Milliseconds(50)))
                .status()
                .code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST_F(StoreServerTest, OfAnotherJobNobodyIsLetIn) {
  options_.key = "another";
  EXPECT_EQ(ConnectStore(options_, Deadline::After(kEnough)).status().code(),
            absl::StatusCode::kPermissionDenied);
}

TEST_F(StoreServerTest, OneThatIsSilentIsAnErrorInTime) {
  uint16_t port = 0;
  const int silent = OpenListener(/*loopback=*/true, 4, &port);
  ASSERT_GE(silent, 0);
  options_.port = port;
  EXPECT_EQ(ConnectStore(options_, Deadline::After(absl::Milliseconds(100)))
                .status()
                .code(),
            absl::StatusCode::kDeadlineExceeded);
  close(silent);
}

TEST_F(StoreServerTest, WithoutADescriptorTheLimitIsNamedAtOnce) {
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next = dup(STDIN_FILENO);  // the lowest that is free
  close(next);
  const rlimit none = {static_cast<rlim_t>(next), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto store = ConnectStore(options_, Deadline::After(kEnough));
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_THAT(store.status(),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("no descriptor for a connection"),
                             HasSubstr("ulimit -n"))));
}

TEST_F(StoreServerTest, APortInUseIsAnError) {
  StoreServer::Options server;
  server.loopback = true;
  server.port = options_.port;
  EXPECT_EQ(StoreServer::Start(server).status().code(),
            absl::StatusCode::kAlreadyExists);
}

}  // namespace
}  // namespace tessera
