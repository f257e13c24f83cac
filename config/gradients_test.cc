// Tests the keys of clipping and scaling.
#include <cmath>
#include <string>
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
using ::testing::AllOf;
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

std::string WithStepsInBackward(const std::string& more) {
  return absl::StrCat(R"({"train_micro_batch_size_per_gpu": 1,
      "gradient_clipping": 0,
      "sharding": {"step_in_backward": true)",
                      more, "}");
}

TEST(StepInBackward, IsRefusedWithWhatNeedsAllGradients) {
  constexpr char kAdamW[] = R"(}, "optimizer": {"type": "AdamW"})";
  const std::pair<std::string, const char*> cases[] = {
      {R"(}, "optimizer": {"type": "Lamb"})", "optimizer.type is Lamb"},
      {R"(}, "optimizer": {"type": "Muon"})", "optimizer.type is Muon"},
      {R"(}, "optimizer": {"type": "Adafactor"})", "type is Adafactor"},
      {R"(}, "optimizer": {"type": "Custom"})", "optimizer.type is Custom"},
      {R"(})", "there is no optimizer"},
      {absl::StrCat(R"(, "report_grad_norm": true)", kAdamW),
       "sharding.report_grad_norm is true"},
      {absl::StrCat(kAdamW, R"(, "histograms": {"every_steps": 9})"),
       "histograms.gradients is true"},
      {absl::StrCat(R"(, "served_gathers": "on")", kAdamW),
       "sharding.served_gathers is on"},
      {absl::StrCat(R"(, "shared_working_copy": "on")", kAdamW),
       "sharding.shared_working_copy is on"},
      {absl::StrCat(kAdamW, R"(, "gradient_accumulation_steps": 2)"),
       "gradient_accumulation_steps is 2"},
      {absl::StrCat(kAdamW, R"(, "adaptive_gradient_clipping": 0.1)"),
       "adaptive_gradient_clipping is 0.1"},
      {absl::StrCat(kAdamW, R"(, "fp16": {"enabled": true})"),
       "fp16.enabled is true"},
      {absl::StrCat(kAdamW, R"(, "bf16": {"enabled": true})"),
       "bf16.check_grad_overflow is true"},
      {absl::StrCat(kAdamW, R"(, "zero_optimization":
          {"offload_optimizer": {"device": "cpu"}})"),
       "zero_optimization.offload_optimizer.device is cpu"},
      {absl::StrCat(kAdamW, R"(, "zero_optimization":
          {"stage": 3, "offload_param": {"device": "cpu"}})"),
       "zero_optimization.offload_param.device is cpu"},
      {R"(}, "optimizer": {"type": "SGD", "param_groups": [
          {"parameters": ["*"], "gradient_clipping": 1}]})",
       "optimizer.param_groups has gradient_clipping 1"},
  };
  for (const auto& [more, why] : cases) {
    const auto config = ParseConfig(WithStepsInBackward(more), "f.json", 2);
    EXPECT_THAT(config.status(),
                StatusIs(StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("sharding.step_in_backward: expected "
                                         "false, got true: "),
                               HasSubstr(why))))
        << more;
  }
}

// Nobody reads what a rank steps.
TEST(StepInBackward, NeitherSharesNorServes) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ParseConfig(WithStepsInBackward(R"(}, "optimizer": {"type": "AdamW"},
          "gradient_clipping_value": 1, "bf16": {"enabled": true,
          "check_grad_overflow": false},
          "histograms": {"every_steps": 9, "gradients": false})"),
                  "f.json", 2));
  EXPECT_EQ(config.sharding().shared_working_copy(), "off");
  EXPECT_EQ(config.sharding().served_gathers(), "off");
}

}  // namespace
}  // namespace tessera
