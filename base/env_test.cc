#include "base/env.h"

#include <cstdlib>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::Eq;
using ::testing::Optional;

constexpr char kName[] = "TESSERA_ENV_TEST";

class EnvTest : public ::testing::Test {
 protected:
  ~EnvTest() override { unsetenv(kName); }
  static void Set(const char* text) { setenv(kName, text, 1); }
};

TEST_F(EnvTest, AbsentAndEmptyAreNullopt) {
  for (const bool empty : {false, true}) {
    if (empty) Set("");
    EXPECT_EQ(EnvString(kName), std::nullopt);
    EXPECT_THAT(EnvBool(kName), IsOkAndHolds(Eq(std::nullopt)));
  }
}

TEST_F(EnvTest, ReadsValues) {
  Set("-12");
  EXPECT_THAT(EnvString(kName), Optional(std::string("-12")));
}

TEST_F(EnvTest, ReadsBooleans) {
  for (const char* text : {"1", "true", "Yes", "ON"}) {
    Set(text);
    EXPECT_THAT(EnvBool(kName), IsOkAndHolds(Optional(true))) << text;
  }
  for (const char* text : {"0", "false", "no", "Off"}) {
    Set(text);
    EXPECT_THAT(EnvBool(kName), IsOkAndHolds(Optional(false))) << text;
  }
}

TEST_F(EnvTest, MisfitsNameVariableAndText) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  Set("3x");
  EXPECT_THAT(EnvBool(kName),
              StatusIs(kInvalid,
                       "environment variable TESSERA_ENV_TEST: expected 1, "
                       "true, yes, on, 0, false, no or off, got '3x'"));
}

}  // namespace
}  // namespace tessera
