#include "comm/gloo/gloo_interface.h"

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::vector<InterfaceAddress> kHere = {
    {"lo", "", true, true},          {"eth0", "", true, false},
    {"ib0", "", false, false},       {"bare", "", true, false},
    {"lo", "127.0.0.1", true, true}, {"eth0", "10.0.0.2", true, false},
    {"lo", "::1", true, true},
};

TEST(GlooInterfaceTest, OneThatHasAnAddress) {
  TESSERA_EXPECT_OK(CheckGlooInterface("eth0", kHere));
}

TEST(GlooInterfaceTest, OthersAreToldOfAllThatAreThere) {
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"^lo,docker", "no list, exclusion"},
      {"eth0,eth1", "no list, exclusion"},
      {"=eth0", "exact match"},
      {"eth", "no interface of that name"},
      {"ETH0", "no interface of that name"},
      {" eth0", "no interface of that name"},
      {"lo", "leads to this host alone"},
      {"ib0", "that interface is down"},
      {"bare", "has no address"},
  };
  for (const auto& [name, what] : wrong) {
    EXPECT_THAT(
        CheckGlooInterface(name, kHere),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 AllOf(HasSubstr("GLOO_SOCKET_IFNAME is '" + name + "': "),
                       HasSubstr(what),
                       HasSubstr("this host has bare (no address), eth0 "
                                 "(10.0.0.2), ib0 (down), lo (127.0.0.1, ::1)"),
                       HasSubstr("or unset it"))));
  }
}

TEST(GlooInterfaceTest, TheLoopbackIsHere) {
  EXPECT_THAT(InterfacesHere(),
              testing::Contains(testing::Field(&InterfaceAddress::loopback,
                                               testing::IsTrue())));
}

}  // namespace
}  // namespace tessera
