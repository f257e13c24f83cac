#include "base/env.h"

#include <cstdlib>

#include "absl/time/time.h"
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
    EXPECT_THAT(EnvInt64(kName), IsOkAndHolds(Eq(std::nullopt)));
    EXPECT_THAT(EnvDouble(kName), IsOkAndHolds(Eq(std::nullopt)));
    EXPECT_THAT(EnvBool(kName), IsOkAndHolds(Eq(std::nullopt)));
    EXPECT_THAT(EnvDuration(kName), IsOkAndHolds(Eq(std::nullopt)));
  }
}

TEST_F(EnvTest, ReadsValues) {
  Set("-12");
  EXPECT_THAT(EnvString(kName), Optional(std::string("-12")));
  EXPECT_THAT(EnvInt64(kName), IsOkAndHolds(Optional(-12)));
  Set("1.5e3");
  EXPECT_THAT(EnvDouble(kName), IsOkAndHolds(Optional(1500.0)));
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

TEST_F(EnvTest, ReadsDurations) {
  const std::pair<const char*, absl::Duration> cases[] = {
      {"30", absl::Seconds(30)},
      {"0.25", absl::Milliseconds(250)},
      {"1.5s", absl::Milliseconds(1500)},
      {"5m", absl::Minutes(5)}};
  for (const auto& [text, expected] : cases) {
    Set(text);
    EXPECT_THAT(EnvDuration(kName), IsOkAndHolds(Optional(expected))) << text;
  }
}

TEST_F(EnvTest, MisfitsNameVariableAndText) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  Set("3x");
  EXPECT_THAT(EnvInt64(kName),
              StatusIs(kInvalid,
                       "environment variable TESSERA_ENV_TEST: expected an "
                       "integer, got '3x'"));
  EXPECT_THAT(EnvDouble(kName),
              StatusIs(kInvalid,
                       "environment variable TESSERA_ENV_TEST: expected a "
                       "finite number, got '3x'"));
  EXPECT_THAT(EnvBool(kName),
              StatusIs(kInvalid,
                       "environment variable TESSERA_ENV_TEST: expected 1, "
                       "true, yes, on, 0, false, no or off, got '3x'"));
  EXPECT_THAT(EnvDuration(kName),
              StatusIs(kInvalid,
                       "environment variable TESSERA_ENV_TEST: expected a "
                       "duration such as 30, 1.5s or 5m, got '3x'"));
  Set("99999999999999999999");
  EXPECT_THAT(EnvInt64(kName), StatusIs(kInvalid));
  Set("nan");
  EXPECT_THAT(EnvDouble(kName), StatusIs(kInvalid));
  EXPECT_THAT(EnvDuration(kName), StatusIs(kInvalid));
  Set("-1s");
  EXPECT_THAT(EnvDuration(kName), StatusIs(kInvalid));
}

TEST_F(EnvTest, RangeIsInclusive) {
  constexpr Int64Range kRange = {0, 7};
  Set("0");
  EXPECT_THAT(EnvInt64(kName, kRange), IsOkAndHolds(Optional(0)));
  Set("7");
  EXPECT_THAT(EnvInt64(kName, kRange), IsOkAndHolds(Optional(7)));
  Set("8");
  EXPECT_THAT(EnvInt64(kName, kRange),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "environment variable TESSERA_ENV_TEST: expected an "
                       "integer of 0 to 7, got '8'"));
  Set("-1");
  EXPECT_THAT(EnvInt64(kName, {0, INT64_MAX}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       ::testing::HasSubstr("an integer of at least 0")));
}

}  // namespace
}  // namespace tessera
