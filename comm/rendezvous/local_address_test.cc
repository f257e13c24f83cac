#include "comm/rendezvous/local_address.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

RankInfo Info(const std::string& host, const std::string& address) {
  RankInfo info;
  info.host = host;
  info.network = "net";
  info.address = address;
  return info;
}

std::string Nowhere(const std::string&) { return ""; }

TEST(AddressTowardTest, TheLoopbackLeadsToItself) {
  EXPECT_EQ(AddressToward("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(AddressToward("no such host"), "");
}

TEST(IsThisHostTest, WhatASocketCanBeBoundTo) {
  EXPECT_TRUE(IsThisHost("127.0.1.1"));
  EXPECT_TRUE(IsThisHost("localhost"));
  EXPECT_FALSE(IsThisHost("192.0.2.1"));  // of no host, by RFC 5737
  EXPECT_FALSE(IsThisHost("no such host"));
}

TEST(IsLoopbackTest, BothFamilies) {
  EXPECT_TRUE(IsLoopback("127.0.1.1"));
  EXPECT_TRUE(IsLoopback("::1"));
  EXPECT_FALSE(IsLoopback("10.0.0.1"));
  EXPECT_FALSE(IsLoopback("fe80::1"));
}

TEST(ChooseAddressTest, TheWayToTheRendezvousHost) {
  EXPECT_EQ(
      ChooseAddress({Info("a", "10.0.0.1"), Info("b", "10.0.0.2")}, 1, Nowhere),
      "10.0.0.2");
}

TEST(ChooseAddressTest, OnItsHostTheWayToAnother) {
  const std::vector<RankInfo> infos = {Info("a", "127.0.1.1"), Info("a", ""),
                                       Info("b", "10.0.0.2")};
  const auto toward = [](const std::string& address) -> std::string {
    return address == "10.0.0.2" ? "10.0.0.1" : "";
  };
  EXPECT_EQ(ChooseAddress(infos, 0, toward), "10.0.0.1");
  EXPECT_EQ(ChooseAddress(infos, 1, toward), "10.0.0.1");
  EXPECT_EQ(ChooseAddress(infos, 0, Nowhere), "");
}

TEST(ChooseAddressTest, AnotherNetworkIsAnotherHost) {
  std::vector<RankInfo> infos = {Info("a", "127.0.0.1"), Info("a", "10.0.0.2")};
  const auto toward = [](const std::string&) { return "10.0.0.1"; };
  EXPECT_EQ(ChooseAddress(infos, 0, toward), "");
  infos[1].network = "other";
  EXPECT_EQ(ChooseAddress(infos, 0, toward), "10.0.0.1");
}

TEST(ChooseAddressTest, NothingThatOthersCouldUse) {
  EXPECT_EQ(ChooseAddress({Info("a", ""), Info("b", "")}, 0, Nowhere), "");
  EXPECT_EQ(ChooseAddress({Info("a", "127.0.0.1"), Info("b", "127.0.0.1")}, 0,
                          Nowhere),
            "");
}

}  // namespace
}  // namespace tessera
