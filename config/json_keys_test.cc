#include "config/reader/json_keys.h"

#include "config/config.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

const google::protobuf::FieldDescriptor& ZeroField(const char* name) {
  return *proto::ZeroOptimization::descriptor()->FindFieldByName(name);
}

TEST(JsonKeys, AreTheNameUnlessOptionsSayMore) {
  EXPECT_THAT(JsonKeys(ZeroField("overlap_comm")), ElementsAre("overlap_comm"));
  EXPECT_THAT(JsonKeys(ZeroField("stage3_max_live_parameters")),
              ElementsAre("stage3_max_live_parameters", "max_live_parameters"));
  EXPECT_THAT(JsonKeys(ZeroField("auto_stage")), ElementsAre("stage"));
  EXPECT_TRUE(HasJsonKey(ZeroField("auto_stage"), "stage"));
  EXPECT_FALSE(HasJsonKey(ZeroField("auto_stage"), "auto_stage"));
}

TEST(FindKeyElsewhere, FindsTheOnlyOne) {
  const auto find = [](absl::string_view key) {
    return FindKeyElsewhere(*proto::Config::descriptor(), key);
  };
  EXPECT_EQ(find("lr"), "optimizer.params.lr");
  EXPECT_EQ(find("stage"), "zero_optimization.stage");  // of two fields
  EXPECT_EQ(find("max_live_parameters"),
            "zero_optimization.max_live_parameters");
  EXPECT_EQ(find("enabled"), "");  // bf16's, fp16's or torch_autocast's?
  EXPECT_EQ(find("auto_stage"), "");
  EXPECT_EQ(find("key"), "");  // half of a map's entry
}

TEST(KeyMeant, IsAKeyThatThereIsOnce) {
  const auto find = [](absl::string_view theirs) {
    return FindKeyElsewhere(*proto::Config::descriptor(), KeyMeant(theirs));
  };
  EXPECT_EQ(find("learning_rate"), "optimizer.params.lr");
  EXPECT_EQ(find("clip_grad_norm"), "gradient_clipping");
  EXPECT_EQ(find("gradient_clip_val"), "gradient_clipping");
  EXPECT_EQ(find("accumulate_grad_batches"), "gradient_accumulation_steps");
  EXPECT_EQ(find("batch_size"), "train_micro_batch_size_per_gpu");
  EXPECT_EQ(find("micro_batch_size"), "train_micro_batch_size_per_gpu");
  EXPECT_EQ(find("per_device_train_batch_size"),
            "train_micro_batch_size_per_gpu");
  EXPECT_EQ(find("global_batch_size"), "train_batch_size");
  EXPECT_EQ(find("zero_stage"), "zero_optimization.stage");
  EXPECT_EQ(find("lr_scheduler"), "scheduler");
  EXPECT_EQ(find("warmup_steps"), "scheduler.params.warmup_num_steps");
  EXPECT_EQ(KeyMeant("lr"), "lr");
}

TEST(FindNearestKey, OffersAllNames) {
  const auto find = [](absl::string_view key) {
    return FindNearestKey(*proto::ZeroOptimization::descriptor(), key);
  };
  EXPECT_EQ(find("max_live_parameter"), "max_live_parameters");
  EXPECT_EQ(find("stage3_max_live_parameter"), "stage3_max_live_parameters");
  EXPECT_EQ(find("stages"), "stage");
  EXPECT_EQ(find("zzz"), "");
}

}  // namespace
}  // namespace tessera
