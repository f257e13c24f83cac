#include "config/config.h"

#include <fcntl.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "config/config_test_util.h"
#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// ---------------------------------------------------------------------- files

// `--config=<(...)` makes such a pipe: whoever reads it first has it all.
TEST(ConfigFiles, APipeThatWasRead) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const std::string text = Json("\"train_batch_size\": 1");
  ASSERT_EQ(write(ends[1], text.data(), text.size()),
            static_cast<ssize_t>(text.size()));
  close(ends[1]);
  const std::string path = absl::StrCat("/dev/fd/", ends[0]);
  TESSERA_EXPECT_OK(LoadConfig(path, 1).status());
  const auto said = StatusIs(
      StatusCode::kInvalidArgument,
      AllOf(HasSubstr("the end of the file"),
            HasSubstr(absl::StrCat(path, " is a pipe, whose text comes once")),
            HasSubstr("write it to a file")));
  EXPECT_THAT(LoadConfig(path, 1).status(), said);
  EXPECT_THAT(LoadCommunication(path).status(), said);
  close(ends[0]);
  // An error for a regular file has no such hint.
  const std::string empty = testing::TempDir() + "/empty.json";
  std::ofstream(empty) << "";
  EXPECT_THAT(LoadConfig(empty, 1).status().message(),
              Not(HasSubstr("is a pipe")));
}

// ---------------------------------------------------------------- batch sizes

struct Batch {
  int64_t train, micro, steps;  // 0: absent
  int world_size;
};

std::string BatchJson(const Batch& batch) {
  std::string json = "{\"gradient_clipping\": 0";
  const auto add = [&](const char* key, int64_t value) {
    if (value != 0) absl::StrAppend(&json, ", \"", key, "\": ", value);
  };
  add("train_batch_size", batch.train);
  add("train_micro_batch_size_per_gpu", batch.micro);
  add("gradient_accumulation_steps", batch.steps);
  return json + "}";
}

TEST(BatchTriangle, InfersWhatIsAbsent) {
  const struct {
    Batch given;
    int64_t train, micro, steps;
  } cases[] = {
      {{32, 4, 2, 4}, 32, 4, 2}, {{32, 4, 0, 4}, 32, 4, 2},
      {{32, 0, 2, 4}, 32, 4, 2}, {{0, 4, 2, 4}, 32, 4, 2},
      {{32, 0, 0, 4}, 32, 8, 1}, {{0, 4, 0, 4}, 16, 4, 1},
      {{1, 0, 0, 1}, 1, 1, 1},   {{0, 1, 0, 1}, 1, 1, 1},
      {{0, 3, 5, 7}, 105, 3, 5}, {{32, 16, 1, 2}, 32, 16, 1},
  };
  for (const auto& c : cases) {
    const std::string json = BatchJson(c.given);
    TESSERA_ASSERT_OK_AND_ASSIGN(
        const proto::Config config,
        ParseConfig(json, "f.json", c.given.world_size));
    EXPECT_EQ(config.train_batch_size(), c.train) << json;
    EXPECT_EQ(config.train_micro_batch_size_per_gpu(), c.micro) << json;
    EXPECT_EQ(config.gradient_accumulation_steps(), c.steps) << json;
  }
}

TEST(BatchTriangle, RefusesWhatDoesNotDivide) {
  const struct {
    Batch given;
    const char* fault;
  } cases[] = {
      {{32, 2, 1, 8},
       "train_batch_size: expected train_micro_batch_size_per_gpu 2 * "
       "gradient_accumulation_steps 1 * world size 8, got 32; 16 would work"},
      {{33, 4, 0, 8},
       "train_batch_size: expected train_micro_batch_size_per_gpu 4 * "
       "gradient_accumulation_steps (absent) * world size 8, got 33; 32 and 64 "
       "would work"},
      {{33, 0, 2, 8},
       "train_batch_size: expected train_micro_batch_size_per_gpu (absent) * "
       "gradient_accumulation_steps 2 * world size 8, got 33; 32 and 48 would "
       "work"},
      {{7, 0, 0, 8},
       "train_batch_size: expected train_micro_batch_size_per_gpu (absent) * "
       "gradient_accumulation_steps 1 * world size 8, got 7; 8 would work"},
      {{16, 32, 0, 1},
       "train_batch_size: expected train_micro_batch_size_per_gpu 32 * "
       "gradient_accumulation_steps (absent) * world size 1, got 16; 32 would "
       "work"},
      {{0, 0, 4, 2},
       "train_batch_size: missing: give it or train_micro_batch_size_per_gpu"},
      {{0, 0, 0, 2},
       "train_batch_size: missing: give it or train_micro_batch_size_per_gpu"},
      {{-4, 0, 0, 2}, "train_batch_size: expected at least 1, got -4"},
      {{8, -1, 0, 2},
       "train_micro_batch_size_per_gpu: expected at least 1, got -1: "
       "leave the key out, and it is inferred"},
      {{8, 0, -2, 2},
       "gradient_accumulation_steps: expected at least 1, got -2"},
      {{0, int64_t{1} << 62, 2, 1},
       "train_micro_batch_size_per_gpu: 4611686018427387904 * "
       "gradient_accumulation_steps 2 * world size 1 is too large"},
      {{0, int64_t{1} << 62, 1, 2},
       "train_micro_batch_size_per_gpu: 4611686018427387904 * "
       "gradient_accumulation_steps 1 * world size 2 is too large"},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(FaultOf(BatchJson(c.given), c.given.world_size), c.fault);
  }
}

TEST(BatchTriangle, ZeroIsNotAbsent) {
  EXPECT_EQ(FaultOf(Json("\"train_batch_size\": 0")),
            "train_batch_size: expected at least 1, got 0");
}

// For every (T, M, G, W) either all three agree afterwards, or it is an error,
// exactly if no positive integers complete what was given.
TEST(BatchTriangle, HoldsForAllSmallNumbers) {
  for (int code = 0; code < 13 * 5 * 5 * 4; ++code) {
    const Batch b{code % 13, code / 13 % 5, code / 65 % 5, code / 325 + 1};
    const int64_t micro_times_steps =
        (b.micro ? b.micro : 1) * (b.steps ? b.steps : 1) * b.world_size;
    const bool possible = b.train == 0 ? b.micro != 0
                          : b.micro && b.steps
                              ? b.train == micro_times_steps
                              : b.train % micro_times_steps == 0;
    const absl::StatusOr<proto::Config> config =
        ParseConfig(BatchJson(b), "f.json", b.world_size);
    ASSERT_EQ(config.ok(), possible) << BatchJson(b) << config.status();
    if (!possible) continue;
    EXPECT_EQ(config->train_batch_size(),
              config->train_micro_batch_size_per_gpu() *
                  config->gradient_accumulation_steps() * b.world_size);
    if (b.train) EXPECT_EQ(config->train_batch_size(), b.train);
    if (b.micro) EXPECT_EQ(config->train_micro_batch_size_per_gpu(), b.micro);
    if (b.steps) EXPECT_EQ(config->gradient_accumulation_steps(), b.steps);
  }
}

TEST(Config, WorldSizeMustBePositive) {
  EXPECT_EQ(FaultOf(Json("\"train_batch_size\": 1"), 0),
            "world_size: expected at least 1, got 0");
}

// --------------------------------------------------------------------- faults

TEST(Faults, AllAreReportedWithPositions) {
  const absl::StatusOr<proto::Config> config = ParseConfig(
      "{\n"
      "  \"train_batch_size\": 33,\n"
      "  \"train_micro_batch_size_per_gpu\": 4,\n"
      "  \"optimizer\": {\"type\": \"Sdg\",\n"
      "    \"params\": {\"lr\": \"1e-3\", \"betas\": [0.9, 2]}},\n"
      "  \"zero_optimization\": {\"stagee\": 3}\n"
      "}\n",
      "run/ds.json", 8);
  EXPECT_THAT(
      config,
      StatusIs(
          StatusCode::kInvalidArgument,
          "run/ds.json:2:23: train_batch_size: expected "
          "train_micro_batch_size_per_gpu 4 * gradient_accumulation_steps "
          "(absent) * world size 8, got 33; 32 and 64 would work; "
          "run/ds.json:4:25: optimizer.type: expected Adam, AdamW, or another "
          "optimizer of DeepSpeed or torch.optim, got 'Sdg', did you mean "
          "'SGD'?; "
          "run/ds.json:5:22: optimizer.params.lr: expected a number, got the "
          "string \"1e-3\"; "
          "run/ds.json:5:45: optimizer.params.betas[1]: expected at least 0 "
          "and less than 1, got 2; "
          "run/ds.json:6:25: zero_optimization.stagee: unknown key, did you "
          "mean 'stage'? (\"unknown_keys\": \"warn\" ignores such keys)"));
}

TEST(Faults, OneMistakeIsReportedOnce) {
  // Each of these keys would be "missing" too.
  EXPECT_EQ(FaultOf(Json("\"train_batch_sizee\": 8")),
            "train_batch_sizee: unknown key, did you mean "
            "'train_batch_size'?");
  EXPECT_EQ(FaultOf("{\"train_batch_size\": 8, \"gradient_cliping\": 0}"),
            "gradient_cliping: unknown key, did you mean "
            "'gradient_clipping'?");
  EXPECT_EQ(FaultOf(OptimizerJson("{\"typ\": \"Adam\"}")),
            "optimizer.typ: unknown key, did you mean 'type'?");
  EXPECT_EQ(FaultOf("{\"train_batch_size\": 8, \"learning_rate\": 0.1}"),
            "learning_rate: unknown key, did you mean 'optimizer.params.lr'?");
  EXPECT_EQ(
      FaultOf(OptimizerJson(
          "{\"type\": \"SGD\", \"params\": {\"lr\": 1}, \"param_groups\":"
          " [{\"parameters\": \"*\", \"params\": {\"learning_rate\": 1}}]}")),
      "optimizer.param_groups[0].params.learning_rate: unknown key, did "
      "you mean 'lr'?");
  EXPECT_EQ(FaultOf(ParamsJson("\"betas\": [0.9, \"x\"]")),
            "optimizer.params.betas[1]: expected a number, got the string "
            "\"x\"");
  EXPECT_EQ(FaultOf("[]"), "expected an object, got an array");
}

TEST(Faults, SyntaxErrorsHaveThePosition) {
  EXPECT_THAT(ParseConfig("{\n \"a\" 1}", "ds.json", 1),
              StatusIs(StatusCode::kInvalidArgument,
                       "ds.json:2:6: expected ':' after the key 'a', got "
                       "'1'"));
}

// ---------------------------------------------------------- protos, text,
// files

TEST(ResolveConfig, ChecksAndCompletesAProto) {
  proto::Config config;
  config.set_train_batch_size(8);
  config.set_gradient_clipping(-1);
  EXPECT_THAT(ResolveConfig(config, 4),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("gradient_clipping: expected a finite"),
                             Not(HasSubstr("; train")))));
  config.clear_gradient_clipping();
  TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config resolved,
                               ResolveConfig(config, 4));
  EXPECT_EQ(resolved.train_micro_batch_size_per_gpu(), 2);
}

// The least that a file can say, and what it comes to.
TEST(ResolveConfig, WritesAllDefaultsOut) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ParseConfig("{\"train_batch_size\": 8}", "f.json", 2));
  EXPECT_EQ(
      config.ShortDebugString(),
      "train_batch_size: 8 train_micro_batch_size_per_gpu: 4 "
      "gradient_accumulation_steps: 1 gradient_clipping: 1 "
      "zero_optimization { stage: 0 overlap_comm: false "
      "reduce_bucket_size: 500000000 stage3_prefetch_bucket_size: 50000000 "
      "stage3_param_persistence_threshold: 100000 "
      "stage3_model_persistence_threshold: 9223372036854775807 "
      "stage3_max_live_parameters: 1000000000 "
      "stage3_max_reuse_distance: 1000000000 "
      "zero_hpz_partition_size: 1 } "
      "gradient_clipping_norm: 2 "
      "bf16 { enabled: false check_grad_overflow: true "
      "bf16_master_weights_and_grads: false "
      "bf16_optimizer_states: false "
      "name_overflows: false } "
      "fp16 { enabled: false auto_cast: false loss_scale: 0 "
      "initial_scale_power: 16 loss_scale_window: 1000 hysteresis: 2 "
      "consecutive_hysteresis: false min_loss_scale: 1 "
      "fp16_master_weights_and_grads: false "
      "name_overflows: false } "
      "torch_autocast { enabled: false dtype: \"bfloat16\" } "
      "prescale_gradients: false gradient_predivide_factor: 1 "
      "sharding { max_unit_numel: 50000000 reshard_after_forward: true "
      "accumulation: \"each\" "
      "memory_limit_bytes: 0 check_writes: false "
      "shared_working_copy: \"auto\" served_gathers: \"auto\" "
      "shard_group_size: 0 buffer_sync: \"local\" "
      "keep_freed_heap: true "
      "report_grad_norm: false deterministic: \"auto\" "
      "offload { checksums: false slice_numel: 1048576 "
      "min_state_bytes: 65536 gradients: false early_step: true "
      "early_bytes: 2147483648 } step_in_backward: false "
      "shard_alone: false } "
      "precision { fp32_norms: false cast_inputs: true libtorch_exact: false "
      "libtorch_fused: false max_skipped_in_a_row: 50 } "
      "gradient_allreduce_op: \"mean\" sequence_parallel_size: 1 "
      "memory_breakdown: false "
      "wall_clock_breakdown: false "
      "activation_checkpointing { cpu_checkpointing: false policy: \"full\" "
      "every: 1 budget_bytes: 0 "
      "check: \"first\" offload: \"none\" offload_min_bytes: 65536 } "
      "unknown_keys: \"error\" "
      "auto_micro_batch: false gradient_clipping_value: 0 "
      "adaptive_gradient_clipping: 0 adaptive_gradient_clipping_eps: 0.001");
}

TEST(ResolveConfig, IsIdempotent) {
  const std::string texts[] = {
      Json("\"train_batch_size\": 4, \"optimizer\": {\"type\": \"adam\"}"),
      "{\"train_batch_size\": 4, \"gradient_clipping_norm\": \"inf\","
      "\"communication_data_type\": \"BF16\", \"fp16\": {\"enabled\": true,"
      "\"auto_cast\": true}, \"data_types\": {\"buffer_dtype\": \"FP32\","
      "\"grad_accum_dtype\": \"FP32\"},"
      "\"zero_optimization\": {\"stage\": \"auto\", \"leaf_module\": "
      "{\"names\": [\"moe\"]}}, \"sharding\": {\"reshard_after_forward\": 2,"
      "\"unit_classes\": [\"Block\"]}}",
      Json("\"train_batch_size\": 4, \"zero_optimization\": "
           "{\"zero_hpz_partition_size\": 2}")};
  for (const std::string& text : texts) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config once,
                                 ParseConfig(text, "f.json", 2));
    TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config twice,
                                 ResolveConfig(once, 2));
    EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(once, twice))
        << twice.DebugString();
  }
}

TEST(ResolveConfig, RefusesNumbersThatAreNotFinite) {
  for (const char* text : {"nan", "inf", "-inf"}) {
    const absl::StatusOr<proto::Config> config = ParseConfig(
        absl::StrCat("train_batch_size: 1 gradient_clipping: 0 optimizer { "
                     "type: \"Adam\" params { lr: ",
                     text, " eps: ", text, " weight_decay: ", text,
                     " betas: ", text, " betas: 0.5 } }"),
        "f.textproto", 1);
    EXPECT_THAT(config,
                StatusIs(StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("params.lr"), HasSubstr("params.eps"),
                               HasSubstr("params.weight_decay"),
                               HasSubstr("params.betas[0]"))));
  }
}

TEST(TextProto, IsCheckedTheSame) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ParseConfig("train_batch_size: 8 gradient_clipping: 0", "f.textproto",
                  2));
  EXPECT_EQ(config.train_micro_batch_size_per_gpu(), 4);
  EXPECT_THAT(
      ParseConfig("train_batch_size: 8\ngradient_clipping: 0\n"
                  "zero_optimization {\n  stage: 7\n}",
                  "f.pbtxt", 2),
      StatusIs(StatusCode::kInvalidArgument,
               "f.pbtxt:4:3: zero_optimization.stage: expected 0, 1, 2 or 3, "
               "got 7"));
  EXPECT_THAT(ParseConfig("train_batch_sizee: 8", "f.textproto", 2),
              StatusIs(StatusCode::kInvalidArgument,
                       "f.textproto:1:18: Message type \"tessera.proto.Config\""
                       " has no field named \"train_batch_sizee\". "
                       "(unknown_keys: \"warn\" ignores such keys)"));
}

TEST(LoadConfig, ReadsAFile) {
  const std::string path = absl::StrCat(::testing::TempDir(), "ds.json");
  std::ofstream(path) << Json("\"train_batch_size\": 4");
  TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config config, LoadConfig(path, 2));
  EXPECT_EQ(config.train_micro_batch_size_per_gpu(), 2);
}

TEST(LoadConfig, LargeFilesAreNotRead) {
  const std::string path = absl::StrCat(::testing::TempDir(), "large.json");
  std::ofstream(path).put('{');
  std::filesystem::resize_file(path, 100 << 20);  // mostly a hole
  EXPECT_EQ(LoadConfig(path, 1).status().message(),
            absl::StrCat(path, ": more than 16777216 bytes"));
  EXPECT_THAT(
      ParseConfig(absl::StrCat("{\"autotuning\": ", std::string(10000, '[')),
                  "f.json", 1),
      StatusIs(StatusCode::kInvalidArgument,
               HasSubstr("f.json:1:79: nested deeper than 64 levels")));
}

TEST(LoadConfig, MissingFileIsNotFound) {
  EXPECT_THAT(LoadConfig("/nowhere/ds.json", 1),
              StatusIs(StatusCode::kNotFound,
                       "/nowhere/ds.json: No such file or directory"));
}

}  // namespace
}  // namespace tessera
