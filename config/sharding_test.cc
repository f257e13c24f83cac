// The sections zero_optimization and sharding.
#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "config/config.h"
#include "config/config_report.h"
#include "config/config_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::HasSubstr;

using ::testing::ElementsAre;

std::string ZeroJson(absl::string_view members) {
  return Json(absl::StrCat("\"train_batch_size\": 12, \"zero_optimization\": {",
                           members, "}"));
}
std::string ShardingJson(absl::string_view members) {
  return Json(
      absl::StrCat("\"train_batch_size\": 12, \"sharding\": {", members, "}"));
}

TEST(Zero, StageIsZeroToThree) {
  const auto with_stage = [](absl::string_view stage) {
    return Json(absl::StrCat(
        "\"train_batch_size\": 1, \"zero_optimization\": {\"stage\": ", stage,
        "}"));
  };
  for (const char* stage : {"0", "1", "2", "3"}) {
    EXPECT_EQ(FaultOf(with_stage(stage)), "OK") << stage;
  }
  EXPECT_EQ(FaultOf(with_stage("7")),
            "zero_optimization.stage: expected 0, 1, 2 or 3, got 7");
  EXPECT_EQ(FaultOf(with_stage("4")),
            "zero_optimization.stage: expected 0, 1, 2 or 3, got 4");
  EXPECT_EQ(FaultOf(with_stage("-1")),
            "zero_optimization.stage: expected 0, 1, 2 or 3, got -1");
}

TEST(Zero, AbsentIsStage0) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ParseConfig(Json("\"train_batch_size\": 1"), "f.json", 1));
  EXPECT_TRUE(config.zero_optimization().has_stage());
  EXPECT_EQ(config.zero_optimization().stage(), 0);
}

TEST(Zero, StageMayBeAuto) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ParseConfig(ZeroJson("\"stage\": \"auto\""), "f.json", 1));
  EXPECT_TRUE(config.zero_optimization().auto_stage());
  EXPECT_FALSE(config.zero_optimization().has_stage());
  EXPECT_EQ(FaultOf(ZeroJson("\"stage\": \"Auto\"")),
            "zero_optimization.stage: expected an integer or \"auto\", got the "
            "string \"Auto\"");
  EXPECT_EQ(FaultOf(ZeroJson("\"stage\": true")),
            "zero_optimization.stage: expected an integer or \"auto\", got "
            "true");
  // The proto's name is none of JSON's.
  EXPECT_EQ(FaultOf(ZeroJson("\"auto_stage\": true")),
            "zero_optimization.auto_stage: unknown key");
}

TEST(Zero, StageMayBeAutoInText) {
  const auto zero = [](absl::string_view members) {
    return ParseConfig(
        absl::StrCat("train_batch_size: 1 zero_optimization { ", members, " }"),
        "f.textproto", 1);
  };
  TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config on,
                               zero("auto_stage: true"));
  EXPECT_TRUE(on.zero_optimization().auto_stage());
  EXPECT_FALSE(on.zero_optimization().has_stage());
  TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config off,
                               zero("auto_stage: false"));
  EXPECT_FALSE(off.zero_optimization().has_auto_stage());
  EXPECT_TRUE(off.zero_optimization().has_stage());
  EXPECT_THAT(zero("stage: 1 auto_stage: true"),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("auto_stage")));
}

TEST(Zero, CountsMayBeWrittenWithExponents) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ParseConfig(ZeroJson("\"reduce_bucket_size\": 5e7,"
                           "\"stage3_prefetch_bucket_size\": 1.5E+6,"
                           "\"stage3_max_live_parameters\": 2e+10"),
                  "f.json", 1));
  const proto::ZeroOptimization& zero = config.zero_optimization();
  EXPECT_EQ(zero.reduce_bucket_size(), 50000000);
  EXPECT_EQ(zero.stage3_prefetch_bucket_size(), 1500000);
  EXPECT_EQ(zero.stage3_max_live_parameters(), 20000000000);
  // An older version of transformers computed such values.
  EXPECT_EQ(FaultOf(ZeroJson("\"stage3_prefetch_bucket_size\": 15099494.4")),
            "zero_optimization.stage3_prefetch_bucket_size: expected an "
            "integer, got 15099494.4");
  EXPECT_EQ(FaultOf(ZeroJson("\"reduce_bucket_size\": 1e20")),
            "zero_optimization.reduce_bucket_size: expected an integer of 64 "
            "bits, got 1e20");
  EXPECT_EQ(FaultOf(ZeroJson("\"reduce_bucket_size\": \"5e8\"")),
            "zero_optimization.reduce_bucket_size: expected an integer, got "
            "the string \"5e8\"");
}

TEST(Zero, CountsHaveRanges) {
  const auto fault = [](const char* key, int64_t value) {
    return FaultOf(ZeroJson(absl::StrCat("\"", key, "\": ", value)));
  };
  EXPECT_EQ(fault("reduce_bucket_size", 1), "OK");
  EXPECT_EQ(fault("reduce_bucket_size", 0),
            "zero_optimization.reduce_bucket_size: expected at least 1, got 0");
  for (const char* key : {"prefetch_bucket_size", "param_persistence_threshold",
                          "model_persistence_threshold", "max_live_parameters",
                          "max_reuse_distance"}) {
    for (const std::string& name :
         {absl::StrCat("stage3_", key), std::string(key)}) {
      EXPECT_EQ(fault(name.c_str(), 0), "OK") << name;
      EXPECT_EQ(fault(name.c_str(), INT64_MAX), "OK") << name;
      EXPECT_EQ(fault(name.c_str(), -1),
                absl::StrCat("zero_optimization.", name,
                             ": expected at least 0, got -1"));
    }
  }
}

TEST(Zero, BothNamesOfAKeyReachTheSameField) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ParseConfig(ZeroJson("\"prefetch_bucket_size\": 1,"
                           "\"param_persistence_threshold\": 2,"
                           "\"model_persistence_threshold\": 3,"
                           "\"max_live_parameters\": 4,"
                           "\"max_reuse_distance\": 5"),
                  "f.json", 1));
  const proto::ZeroOptimization& zero = config.zero_optimization();
  EXPECT_EQ(zero.stage3_prefetch_bucket_size(), 1);
  EXPECT_EQ(zero.stage3_param_persistence_threshold(), 2);
  EXPECT_EQ(zero.stage3_model_persistence_threshold(), 3);
  EXPECT_EQ(zero.stage3_max_live_parameters(), 4);
  EXPECT_EQ(zero.stage3_max_reuse_distance(), 5);
}

TEST(Zero, BothNamesOfAKeyAtOnceAreRefused) {
  EXPECT_THAT(
      ParseConfig("{\"train_batch_size\": 1, \"zero_optimization\": {\n"
                  "  \"max_live_parameters\": 1,\n"
                  "  \"stage3_max_live_parameters\": 1}}",
                  "f.json", 1),
      StatusIs(StatusCode::kInvalidArgument,
               "f.json:3:3: zero_optimization.stage3_max_live_parameters: the "
               "same key as 'zero_optimization.max_live_parameters', whose "
               "value is at 2:26: write one of them"));
}

TEST(Zero, LeafModules) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ParseConfig(ZeroJson("\"leaf_module\": {\"classes\": [\"a::Moe\"], "
                           "\"names\": [\"l.0.moe\"], "
                           "\"name_suffixes\": [\"moe\", \"router\"]}"),
                  "f.json", 1));
  const proto::LeafModule& leaf = config.zero_optimization().leaf_module();
  EXPECT_THAT(leaf.classes(), ElementsAre("a::Moe"));
  EXPECT_THAT(leaf.names(), ElementsAre("l.0.moe"));
  EXPECT_THAT(leaf.name_suffixes(), ElementsAre("moe", "router"));
  for (const char* list : {"classes", "names", "name_suffixes"}) {
    EXPECT_EQ(FaultOf(ZeroJson(absl::StrCat("\"leaf_module\": {\"", list,
                                            "\": [\"x\", \"\"]}"))),
              absl::StrCat("zero_optimization.leaf_module.", list,
                           "[1]: expected a name, got ''"));
  }
}

TEST(Sharding, AllKeys) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ParseConfig(ShardingJson(R"("unit_classes": ["Block"],
        "max_unit_numel": 1e6, "ignored_parameters": ["*.frozen", "w?"],
        "reshard_after_forward": false, "accumulation": "local",
        "memory_limit_bytes": 2e9,
        "check_writes": true, "keep_freed_heap": false,
        "report_grad_norm": true,
        "shared_working_copy": "off",
        "served_gathers": "on", "shard_group_size": 1,
        "buffer_sync": "mean", "deterministic": "on",
        "offload": {"checksums": true, "slice_numel": 8192,
                    "min_state_bytes": 0, "gradients": true,
                    "early_step": false, "early_bytes": 7})"),
                  "f.json", 1));
  EXPECT_EQ(
      config.sharding().ShortDebugString(),
      "unit_classes: \"Block\" max_unit_numel: 1000000 "
      "ignored_parameters: \"*.frozen\" ignored_parameters: \"w?\" "
      "reshard_after_forward: false accumulation: \"local\" "
      "memory_limit_bytes: 2000000000 "
      "check_writes: true shared_working_copy: \"off\" served_gathers: \"on\" "
      "shard_group_size: 1 buffer_sync: \"mean\" "
      "keep_freed_heap: false "
      "report_grad_norm: true deterministic: \"on\" "
      "offload { checksums: true slice_numel: 8192 min_state_bytes: 0 "
      "gradients: true early_step: false early_bytes: 7 } "
      "step_in_backward: false shard_alone: false");
}

TEST(Sharding, HasRanges) {
  const std::pair<const char*, const char*> cases[] = {
      {"\"max_unit_numel\": 1", "OK"},
      {"\"max_unit_numel\": 0",
       "sharding.max_unit_numel: expected at least 1, got 0"},
      {"\"memory_limit_bytes\": -1",
       "sharding.memory_limit_bytes: expected at least 0, got -1"},
      {"\"accumulation\": \"each\"", "OK"},
      {"\"accumulation\": \"none\"",
       "sharding.accumulation: expected each or local, got 'none'"},
      {"\"shared_working_copy\": \"on\"", "OK"},
      {"\"shared_working_copy\": \"true\"",
       "sharding.shared_working_copy: expected auto, on or off, got 'true'"},
      {"\"served_gathers\": \"on\"", "OK"},
      {"\"served_gathers\": \"\"",
       "sharding.served_gathers: expected auto, on or off, got ''"},
      {"\"deterministic\": \"off\"", "OK"},
      {"\"deterministic\": \"true\"",
       "sharding.deterministic: expected auto, on or off, got 'true'"},
      {"\"buffer_sync\": \"rank0\"", "OK"},
      {"\"buffer_sync\": \"sum\"",
       "sharding.buffer_sync: expected local, rank0 or mean, got 'sum'"},
      {"\"unit_classes\": [\"\"]",
       "sharding.unit_classes[0]: expected a name, got ''"},
      {"\"ignored_parameters\": [\"\"]",
       "sharding.ignored_parameters[0]: expected a name, got ''"},
  };
  for (const auto& [members, fault] : cases) {
    EXPECT_EQ(FaultOf(ShardingJson(members)), fault);
  }
}

TEST(Sharding, ReshardIsABooleanOrADivisor) {
  const auto fault = [](absl::string_view value, int world_size) {
    return FaultOf(
        ShardingJson(absl::StrCat("\"reshard_after_forward\": ", value)),
        world_size);
  };
  EXPECT_EQ(fault("true", 6), "OK");
  EXPECT_EQ(fault("false", 6), "OK");
  EXPECT_EQ(fault("2", 6), "OK");
  EXPECT_EQ(fault("3.0", 6), "OK");
  EXPECT_EQ(fault("6", 6), "OK");
  for (const auto& [value, world_size] :
       {std::pair("4", 6), std::pair("12", 6), std::pair("1", 6),
        std::pair("0", 6), std::pair("-2", 6), std::pair("2", 1)}) {
    EXPECT_EQ(fault(value, world_size),
              absl::StrCat("sharding.reshard_after_forward: expected the ranks "
                           "of a group, at least 2 and a divisor of the world "
                           "size ",
                           world_size, ", got ", value));
  }
  EXPECT_EQ(fault("\"true\"", 6),
            "sharding.reshard_after_forward: expected true or false or an "
            "integer, got the string \"true\"");
  EXPECT_EQ(fault("2.5", 6),
            "sharding.reshard_after_forward: expected an integer or true or "
            "false, got 2.5");
}

TEST(Sharding, ReshardKeepsWhatWasWritten) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config number,
      ParseConfig(ShardingJson("\"reshard_after_forward\": 2"), "f.json", 4));
  EXPECT_EQ(number.sharding().reshard_group_size(), 2);
  EXPECT_FALSE(number.sharding().has_reshard_after_forward());
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config no,
      ParseConfig(ShardingJson("\"reshard_after_forward\": false"), "f.json",
                  4));
  EXPECT_FALSE(no.sharding().reshard_after_forward());
  EXPECT_FALSE(no.sharding().has_reshard_group_size());
}

TEST(Sharding, GroupsAreDivisors) {
  const auto fault = [](absl::string_view members) {
    return FaultOf(ShardingJson(members), 6);
  };
  for (int size : {0, 1, 2, 3, 6}) {
    EXPECT_EQ(fault(absl::StrCat("\"shard_group_size\": ", size)), "OK");
  }
  EXPECT_EQ(fault("\"shard_group_size\": 4"),
            "sharding.shard_group_size: expected the ranks of a group, a "
            "divisor of the world size 6, or 0 for all, got 4");
  EXPECT_EQ(fault("\"shard_group_size\": -1"),
            "sharding.shard_group_size: expected at least 0, got -1");
  EXPECT_EQ(fault("\"shard_group_size\": 2, \"reshard_after_forward\": 2"),
            "OK");
  EXPECT_EQ(fault("\"shard_group_size\": 3, \"reshard_after_forward\": 2"),
            "sharding.reshard_after_forward: expected a divisor of "
            "sharding.shard_group_size 3, got 2");
}

TEST(Sharding, GroupsMeanNothingAtStage0) {
  const auto notes = [](int stage, int group) {
    const auto report = ReadConfig(
        Json(absl::StrCat(
            "\"train_batch_size\": 4, \"zero_optimization\": "
            "{\"stage\": ",
            stage, "}, \"sharding\": {\"shard_group_size\": ", group, "}")),
        "f.json", 4);
    std::string text;
    for (const ConfigFault& note : report->notes) {
      absl::StrAppend(&text, note.path, ": ", note.what);
    }
    return text;
  };
  EXPECT_EQ(notes(0, 2),
            "sharding.shard_group_size: has no effect at stage 0, where "
            "nothing is sharded");
  EXPECT_EQ(notes(0, 4), "");
  EXPECT_EQ(notes(1, 2), "");
}

// zero_hpz_partition_size becomes a number for reshard_after_forward.
TEST(Sharding, SecondShardsAreANumberForReshard) {
  const auto config = [](absl::string_view zero, absl::string_view sharding) {
    return ParseConfig(
        Json(absl::StrCat("\"train_batch_size\": 8, \"zero_optimization\": {",
                          zero, "}, \"sharding\": {", sharding, "}")),
        "f.json", 8);
  };
  const auto fault = [&](absl::string_view zero, absl::string_view sharding) {
    return std::string(config(zero, sharding).status().message());
  };
  const char* const hpz = "\"zero_hpz_partition_size\": 4";
  for (const char* sharding :
       {"", "\"reshard_after_forward\": 4", "\"shard_group_size\": 4"}) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config c, config(hpz, sharding));
    EXPECT_EQ(c.sharding().reshard_group_size(), 4) << sharding;
    TESSERA_EXPECT_OK(CheckRunnable(c));
  }
  for (const char* none :
       {"\"zero_hpz_partition_size\": 0", "\"zero_hpz_partition_size\": 1"}) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config c,
                                 config(none, "\"reshard_after_forward\": 2"));
    EXPECT_EQ(c.sharding().reshard_group_size(), 2);
  }
  for (const char* value : {"2", "true", "false"}) {
    EXPECT_THAT(
        fault(hpz, absl::StrCat("\"reshard_after_forward\": ", value)),
        HasSubstr(absl::StrCat("zero_optimization.zero_hpz_partition_size: "
                               "says what becomes of parameters after their "
                               "forward, got 4, and so does "
                               "sharding.reshard_after_forward, which is ",
                               value, ": write one of them")));
  }
  EXPECT_THAT(fault(hpz, "\"shard_group_size\": 2"),
              HasSubstr("zero_optimization.zero_hpz_partition_size: expected a "
                        "divisor of sharding.shard_group_size 2, got 4"));
  EXPECT_THAT(fault(hpz, "\"served_gathers\": \"on\""),
              HasSubstr("sharding.served_gathers: expected auto or off, since "
                        "zero_optimization.zero_hpz_partition_size is a "
                        "number, got 'on'"));
}

TEST(Sharding, ReshardInText) {
  const auto sharding = [](absl::string_view members) {
    return ParseConfig(
        absl::StrCat("train_batch_size: 4\nsharding { ", members, " }"),
        "f.textproto", 4);
  };
  TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config config,
                               sharding("reshard_group_size: 2"));
  EXPECT_EQ(config.sharding().reshard_group_size(), 2);
  EXPECT_THAT(sharding("reshard_group_size: 3"),
              StatusIs(StatusCode::kInvalidArgument,
                       "f.textproto:2:12: sharding.reshard_group_size: "
                       "expected the ranks of a group, at least 2 and a "
                       "divisor of the world size 4, got 3"));
  EXPECT_THAT(
      sharding("reshard_after_forward: true reshard_group_size: 2"),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("reshard_group_size")));
}

}  // namespace
}  // namespace tessera
