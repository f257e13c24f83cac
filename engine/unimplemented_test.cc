#include "engine/unimplemented.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "config/config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;

absl::Status Check(absl::string_view text) {
  const absl::StatusOr<proto::Config> config =
      ParseConfig(absl::StrCat("train_batch_size: 2 ", text), "f.textproto", 2);
  TESSERA_EXPECT_OK(config) << text;
  return config.ok() ? CheckImplemented(*config) : absl::OkStatus();
}

TEST(CheckImplemented, EachKeyIsNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {"bf16 { enabled: true }", "bf16.enabled"},
      {"fp16 { enabled: true }", "fp16.enabled"},
      {"torch_autocast { enabled: true }", "torch_autocast.enabled"},
      {"communication_data_type: \"fp32\"", "communication_data_type"},
      {"precision { buffer_dtype: \"bf16\" }", "precision.buffer_dtype"},
      {"prescale_gradients: true", "prescale_gradients"},
      {"gradient_predivide_factor: 2", "gradient_predivide_factor"},
      {"zero_optimization { auto_stage: true }",
       "zero_optimization.stage \"auto\""},
      {"zero_optimization { leaf_module { names: \"moe\" } }",
       "zero_optimization.leaf_module"},
      {"sharding { unit_classes: \"Block\" }", "sharding.unit_classes"},
      {"sharding { max_unit_numel: 7 }",
       "sharding.max_unit_numel (EngineOptions has it)"},
      {"sharding { ignored_parameters: \"w\" }", "sharding.ignored_parameters"},
      {"sharding { reshard_after_forward: false }",
       "sharding.reshard_after_forward"},
      {"sharding { reshard_group_size: 2 }", "sharding.reshard_after_forward"},
      {"sharding { accumulation: \"local\" }", "sharding.accumulation"},
      {"sharding { gradient_reduction: \"sum\" }",
       "sharding.gradient_reduction"},
      {"sharding { check_writes: true }", "sharding.check_writes"},
  };
  for (const auto& [text, key] : cases) {
    EXPECT_THAT(Check(absl::StrCat("gradient_clipping: 0 ", text)),
                StatusIs(StatusCode::kUnimplemented,
                         absl::StrCat("not available in this version: ", key)));
  }
}

TEST(CheckImplemented, ClippingMustBeOff) {
  EXPECT_THAT(Check(""),
              StatusIs(StatusCode::kUnimplemented,
                       "not available in this version: gradient_clipping (1.0 "
                       "where absent: write 0)"));
  TESSERA_EXPECT_OK(Check("gradient_clipping: 0"));
}

TEST(CheckImplemented, KeysOfSpeedAreNotLookedAt) {
  TESSERA_EXPECT_OK(
      Check("gradient_clipping: 0 zero_optimization { stage: 3 overlap_comm: "
            "false reduce_bucket_size: 1 stage3_max_live_parameters: 0 }"));
}

}  // namespace
}  // namespace tessera
