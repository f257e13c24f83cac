#include "comm/nccl/nccl_environment.h"

#include <stdlib.h>

#include <string>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StrEq;

TEST(NcclEnvironmentTest, WhatTheUserHasSetStays) {
  setenv("NCCL_TEST_ONE", "by hand", 1);
  setenv("NCCL_TEST_TWO", "", 1);
  unsetenv("NCCL_TEST_THREE");
  EXPECT_THAT(SetNcclEnvironment({{"NCCL_TEST_ONE", "1"},
                                  {"NCCL_TEST_TWO", "2"},
                                  {"NCCL_TEST_THREE", "3"}}),
              ElementsAre("NCCL_TEST_THREE=3"));
  EXPECT_THAT(getenv("NCCL_TEST_ONE"), StrEq("by hand"));
  EXPECT_THAT(getenv("NCCL_TEST_TWO"), StrEq(""));
  EXPECT_THAT(getenv("NCCL_TEST_THREE"), StrEq("3"));
}

TEST(NcclEnvironmentTest, StartsInHostOrderUnlessTheUserSaysOtherwise) {
  constexpr char kName[] = "NCCL_LAUNCH_ORDER_IMPLICIT";
  unsetenv(kName);
  EXPECT_TRUE(StartInHostOrder());
  EXPECT_THAT(getenv(kName), StrEq("1"));
  EXPECT_TRUE(StartInHostOrder());
  setenv(kName, "0", 1);
  EXPECT_FALSE(StartInHostOrder());
  EXPECT_THAT(getenv(kName), StrEq("0"));
}

TEST(NcclEnvironmentTest, RefusesOtherNames) {
  TESSERA_EXPECT_OK(CheckNcclEnvironment({{"NCCL_DEBUG", "INFO"}}));
  for (const char* name :
       {"DEBUG", "NCCL_", "nccl_debug", "NCCL_A=B", "", "PATH"}) {
    EXPECT_THAT(CheckNcclEnvironment({{name, "x"}}),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr(std::string("NCCL setting '") + name +
                                   "': expected the name of a variable that "
                                   "begins with NCCL_")));
  }
  EXPECT_THAT(CheckNcclEnvironment({{"NCCL_X", std::string("a\0b", 3)}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("'NCCL_X': its value has a null byte")));
}

}  // namespace
}  // namespace tessera
