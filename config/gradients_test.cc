// Tests the keys of clipping and scaling.
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "config/config.h"
#include "config/config_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::HasSubstr;

TEST(Gradients, HaveRanges) {
  const std::pair<const char*, const char*> cases[] = {
      {"\"gradient_clipping\": 0.0", "OK"},
      {"\"gradient_clipping\": 5", "OK"},
      {"\"gradient_clipping\": -1",
       "gradient_clipping: expected a finite number of at least 0, got -1: 0 "
       "is no clipping"},
      {"\"gradient_clipping\": \"inf\"",
       "gradient_clipping: expected a number, got the string \"inf\""},
      {"\"gradient_clipping_value\": 0.5", "OK"},
      {"\"gradient_clipping_value\": -1",
       "gradient_clipping_value: expected a finite number of at least 0, got "
       "-1"},
      {"\"adaptive_gradient_clipping\": 0.01", "OK"},
      {"\"adaptive_gradient_clipping\": -1",
       "adaptive_gradient_clipping: expected a finite number of at least 0, "
       "got "
       "-1"},
      {"\"adaptive_gradient_clipping_eps\": 0",
       "adaptive_gradient_clipping_eps: expected a finite number above 0, got "
       "0"},
      {"\"gradient_clipping_norm\": 0.5", "OK"},
      {"\"gradient_clipping_norm\": \"inf\"", "OK"},
      {"\"gradient_clipping_norm\": 0",
       "gradient_clipping_norm: expected a number above 0, or inf, got 0"},
      {"\"gradient_clipping_norm\": -2",
       "gradient_clipping_norm: expected a number above 0, or inf, got -2"},
      {"\"gradient_clipping_norm\": \"max\"",
       "gradient_clipping_norm: expected a number or \"inf\", got the string "
       "\"max\""},
      {"\"prescale_gradients\": true", "OK"},
      {"\"gradient_predivide_factor\": 8", "OK"},
      {"\"gradient_predivide_factor\": 0",
       "gradient_predivide_factor: expected a finite number above 0, got 0"},
  };
  for (const auto& [members, fault] : cases) {
    EXPECT_EQ(FaultOf(absl::StrCat("{\"train_batch_size\": 1, ", members, "}")),
              fault);
  }
}

TEST(Gradients, HaveDeepSpeedsDefaults) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ParseConfig("{\"train_batch_size\": 1}", "f.json", 1));
  EXPECT_TRUE(config.has_gradient_clipping());
  EXPECT_EQ(config.gradient_clipping(), 1.0);
  EXPECT_TRUE(config.has_gradient_clipping_norm());
  EXPECT_EQ(config.gradient_clipping_norm(), 2);
  EXPECT_TRUE(config.has_prescale_gradients());
  EXPECT_FALSE(config.prescale_gradients());
  EXPECT_EQ(config.gradient_predivide_factor(), 1);
}

TEST(Gradients, TheNormMayBeInfinite) {
  for (const auto& [text, file] :
       {std::pair("{\"train_batch_size\": 1, \"gradient_clipping_norm\": "
                  "\"inf\"}",
                  "f.json"),
        std::pair("train_batch_size: 1 gradient_clipping_norm: inf",
                  "f.textproto")}) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config config,
                                 ParseConfig(text, file, 1));
    EXPECT_TRUE(std::isinf(config.gradient_clipping_norm())) << file;
  }
  EXPECT_THAT(
      ParseConfig("train_batch_size: 1 gradient_clipping_norm: nan", "f.pbtxt",
                  1),
      StatusIs(StatusCode::kInvalidArgument,
               HasSubstr("gradient_clipping_norm: expected a number above 0")));
}

}  // namespace
}  // namespace tessera
