#include "comm/rendezvous/local_address.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

RankInfo Card(const std::string& host, const std::string& address) {
  RankInfo card;
  card.host = host;
  card.network = "net";
  card.address = address;
  return card;
}

std::string Nowhere(const std::string&) { return ""; }

TEST(AddressTowardTest, TheLoopbackLeadsToItself) {
  EXPECT_EQ(AddressToward("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(AddressToward("no such host"), "");
}

TEST(IsLoopbackTest, BothFamilies) {
  EXPECT_TRUE(IsLoopback("127.0.1.1"));
  EXPECT_TRUE(IsLoopback("::1"));
  EXPECT_FALSE(IsLoopback("10.0.0.1"));
  EXPECT_FALSE(IsLoopback("fe80::1"));
}

TEST(ChooseAddressTest, TheWayToTheRendezvousHost) {
  EXPECT_EQ(
      ChooseAddress({Card("a", "10.0.0.1"), Card("b", "10.0.0.2")}, 1, Nowhere),
      "10.0.0.2");
}

TEST(ChooseAddressTest, OnItsHostTheWayToAnother) {
  const std::vector<RankInfo> cards = {Card("a", "127.0.1.1"), Card("a", ""),
                                       Card("b", "10.0.0.2")};
  const auto toward = [](const std::string& address) -> std::string {
    return address == "10.0.0.2" ? "10.0.0.1" : "";
  };
  EXPECT_EQ(ChooseAddress(cards, 0, toward), "10.0.0.1");
  EXPECT_EQ(ChooseAddress(cards, 1, toward), "10.0.0.1");
  EXPECT_EQ(ChooseAddress(cards, 0, Nowhere), "");
}

TEST(ChooseAddressTest, AnotherNetworkIsAnotherHost) {
  std::vector<RankInfo> cards = {Card("a", "127.0.0.1"), Card("a", "10.0.0.2")};
  const auto toward = [](const std::string&) { return "10.0.0.1"; };
  EXPECT_EQ(ChooseAddress(cards, 0, toward), "");
  cards[1].network = "other";
  EXPECT_EQ(ChooseAddress(cards, 0, toward), "10.0.0.1");
}

TEST(ChooseAddressTest, NothingThatOthersCouldUse) {
  EXPECT_EQ(ChooseAddress({Card("a", ""), Card("b", "")}, 0, Nowhere), "");
  EXPECT_EQ(ChooseAddress({Card("a", "127.0.0.1"), Card("b", "127.0.0.1")}, 0,
                          Nowhere),
            "");
}

}  // namespace
}  // namespace tessera
