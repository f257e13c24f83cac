// Tests what DeepSpeed's files hold besides plain values: deprecated forms,
// keys that do nothing here, that are missing, or that were removed.
#include <string>
#include <utility>
#include <vector>

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
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

std::string With(absl::string_view members) {
  return Json(absl::StrCat("\"train_batch_size\": 8, ", members));
}

ConfigReport ReportOf(absl::string_view members, int world_size = 1) {
  const absl::StatusOr<ConfigReport> report =
      ReadConfig(With(members), "f.json", world_size);
  EXPECT_TRUE(report.ok()) << report.status();
  return report.ok() ? *report : ConfigReport();
}

std::vector<std::string> NotesOf(absl::string_view members) {
  const ConfigReport report = ReportOf(members);
  EXPECT_THAT(report.faults, IsEmpty()) << members;
  std::vector<std::string> notes;
  for (const ConfigFault& note : report.notes) {
    notes.push_back(absl::StrCat(note.path, ": ", note.what));
  }
  return notes;
}

std::string ZeroFault(absl::string_view members, int world_size = 1) {
  return FaultOf(With(absl::StrCat("\"zero_optimization\": {", members, "}")),
                 world_size);
}

TEST(DeepSpeed, ABooleanIsStageOneOrZero) {
  for (const auto& [written, stage] :
       {std::pair("true", 1), std::pair("false", 0)}) {
    const std::string members =
        absl::StrCat("\"zero_optimization\": ", written);
    EXPECT_EQ(ReportOf(members).config.zero_optimization().stage(), stage);
    EXPECT_THAT(NotesOf(members),
                ElementsAre(absl::StrCat("zero_optimization: deprecated: write "
                                         "{\"stage\": ",
                                         stage, "}")));
  }
}

TEST(DeepSpeed, FormerOffloadKeysSetTheNewOnes) {
  const ConfigReport report = ReportOf(
      "\"zero_optimization\": {\"stage\": 3, \"cpu_offload\": true, "
      "\"cpu_offload_param\": true, "
      "\"stage3_gather_fp16_weights_on_model_save\": true}");
  const proto::ZeroOptimization& zero = report.config.zero_optimization();
  EXPECT_EQ(zero.offload_optimizer().device(), "cpu");
  EXPECT_EQ(zero.offload_param().device(), "cpu");
  EXPECT_TRUE(zero.gather_16bit_weights_on_model_save());
  EXPECT_FALSE(zero.has_cpu_offload());
  ASSERT_EQ(report.notes.size(), 3);
  EXPECT_EQ(report.notes[0].what,
            "deprecated: write \"offload_optimizer\": {\"device\": \"cpu\"}");
  EXPECT_THAT(NotesOf("\"zero_optimization\": {\"cpu_offload\": false}"),
              ElementsAre(HasSubstr("cpu_offload: deprecated")));
  EXPECT_EQ(ZeroFault("\"cpu_offload\": true, \"offload_optimizer\": {}"),
            "zero_optimization.cpu_offload: says the same as "
            "offload_optimizer: write that alone");
}

TEST(DeepSpeed, KeysWithoutEffectAreNoted) {
  EXPECT_THAT(
      NotesOf("\"disable_python_gc\": true, \"zero_optimization\": "
              "{\"stage\": 1, \"sub_group_size\": 1e9}, "
              "\"compile\": {\"deepcompile\": true}, "
              "\"comms_logger\": {\"debug\": true}"),
      ElementsAre("disable_python_gc: has no effect: there is no Python",
                  "zero_optimization.sub_group_size: has no effect: the "
                  "optimizer works unit by unit, in place",
                  HasSubstr("compile: has no effect: "),
                  "comms_logger.debug: has no effect: the tables show what "
                  "each collective was for"));
  EXPECT_THAT(NotesOf("\"wall_clock_breakdown\": true, \"steps_per_print\": "
                      "10, \"flops_profiler\": {\"enabled\": true}, "
                      "\"tensorboard\": {\"enabled\": true}"),
              IsEmpty());
  EXPECT_THAT(
      NotesOf("\"aio\": {\"thread_count\": 4}"),
      UnorderedElementsAre("aio: has no effect: nothing is offloaded to nvme",
                           HasSubstr("aio.thread_count: has no effect: "
                                     "DeepSpeed renamed it")));
  EXPECT_THAT(NotesOf("\"optimizer\": {\"type\": \"zerooneadam\"}"),
              ElementsAre("optimizer.type: ZeroOneAdam: DeepSpeed 0.19.8 has "
                          "removed it: use AdamW"));
  EXPECT_THAT(NotesOf("\"autotuning\": {\"anything\": [1, {\"x\": null}]}"),
              ElementsAre(HasSubstr("autotuning: has no effect")));
}

TEST(DeepSpeed, UnknownKeysOfBlocksAreRefused) {
  EXPECT_EQ(FaultOf(With("\"flops_profiler\": {\"enable\": true}")),
            "flops_profiler.enable: unknown key, did you mean 'enabled'?");
  EXPECT_EQ(FaultOf(With("\"compile\": {\"backend\": \"inductor\"}")),
            "compile.backend: unknown key, did you mean "
            "'communication.backend'?");
  EXPECT_EQ(FaultOf(With("\"wandb\": {\"host\": \"h\"}")),
            "wandb.host: unknown key");
  EXPECT_EQ(FaultOf(With("\"zero_optimisation\": {\"stage\": 3}")),
            "zero_optimisation: unknown key, did you mean "
            "'zero_optimization'?");
}

TEST(DeepSpeed, RemovedKeysSayWhatToUse) {
  EXPECT_EQ(FaultOf(With("\"amp\": {\"enabled\": false}")),
            "amp: refused: DeepSpeed 0.19.8 removed Apex: use bf16, fp16 or "
            "torch_autocast");
  EXPECT_EQ(ZeroFault("\"mics_shard_size\": -1"),
            "zero_optimization.mics_shard_size: refused: DeepSpeed 0.19.8 "
            "removed MiCS: use sharding.shard_group_size");
  for (const char* key :
       {"nebula", "compression_training", "quantize_training",
        "sparse_gradients", "eigenvalue", "sparse_attention", "elasticity",
        "graph_harvesting", "curriculum_learning", "progressive_layer_drop"}) {
    EXPECT_THAT(FaultOf(With(absl::StrCat("\"", key, "\": {}"))),
                HasSubstr(": refused: DeepSpeed 0.19.8 removed "));
  }
  // These keys are refused in a proto, too.
  proto::Config config;
  config.set_train_batch_size(1);
  config.mutable_amp();
  EXPECT_THAT(ResolveConfig(config, 1), StatusIs(StatusCode::kInvalidArgument,
                                                 HasSubstr("amp: refused")));
}

TEST(DeepSpeed, NullIsAbsentWhereItIsThere) {
  const ConfigReport report = ReportOf(
      "\"train_micro_batch_size_per_gpu\": null, "
      "\"gradient_accumulation_steps\": null, \"bf16\": null, \"aio\": null, "
      "\"optimizer\": {\"type\": \"Adam\", \"params\": null}, "
      "\"zero_optimization\": {\"leaf_module\": null}");
  EXPECT_THAT(report.faults, IsEmpty());
  EXPECT_EQ(report.config.train_micro_batch_size_per_gpu(), 8);
  EXPECT_EQ(report.config.optimizer().params().lr(), 1e-3);
}

TEST(DeepSpeed, DtypesHaveItsNames) {
  const ConfigReport report = ReportOf(
      "\"torch_autocast\": {\"dtype\": \"torch.bfloat16\"}, \"data_types\": "
      "{\"param_dtype\": \"float32\", \"buffer_dtype\": \"bfloat16\"}, "
      "\"gradient_allreduce_op\": \"SUM\"");
  EXPECT_THAT(report.faults, IsEmpty());
  EXPECT_EQ(report.config.torch_autocast().dtype(), "bfloat16");
  EXPECT_EQ(report.config.data_types().param_dtype(), "fp32");
  EXPECT_EQ(report.config.data_types().buffer_dtype(), "bf16");
  EXPECT_EQ(report.config.gradient_allreduce_op(), "sum");
  EXPECT_THAT(NotesOf("\"torch_autocast\": {\"enabled\": true, \"dtype\": "
                      "\"fp16\"}"),
              ElementsAre(HasSubstr("the loss is not scaled here")));
}

TEST(DeepSpeed, AllFaultsComeAtOnceBehindDuplicates) {
  const ConfigReport report = ReportOf(
      "\"zero_optimization\": {\"stage\": 1, \"stage\": 2}, \"bf16\": "
      "{\"enabld\": true}, \"fp16\": 3");
  std::vector<std::string> lines;
  for (const ConfigFault& fault : report.faults) {
    lines.push_back(absl::StrCat(fault.path, ": ", fault.what));
  }
  EXPECT_THAT(lines,
              ElementsAre("zero_optimization.stage: duplicate key, first at "
                          "1:71",
                          absl::StrCat("bf16.enabld: unknown key, did you "
                                       "mean 'enabled'?",
                                       kHowToIgnore),
                          "fp16: expected an object, got 3"));
  const absl::StatusOr<proto::Config> text = ParseConfig(
      "train_batch_size: 8\nstag: 1\nzero_optimization { stagee: 2 stage: 9 }",
      "t.textproto", 1);
  EXPECT_THAT(text, StatusIs(StatusCode::kInvalidArgument,
                             ::testing::AllOf(HasSubstr("t.textproto:2:"),
                                              HasSubstr("\"stag\""),
                                              HasSubstr("\"stagee\""))));
}

// These cases cannot be expressed in JSON.
TEST(DeepSpeed, TextIsCheckedToo) {
  const auto fault = [](absl::string_view text) {
    return std::string(ParseConfig(absl::StrCat("train_batch_size: 8 ", text),
                                   "t.textproto", 1)
                           .status()
                           .message());
  };
  EXPECT_THAT(fault("autotuning { json: \"{bad\" }"),
              HasSubstr("autotuning: expected a JSON object"));
  EXPECT_THAT(fault("autotuning { }"), HasSubstr("expected a JSON object"));
  EXPECT_THAT(fault("flops_profiler { recompute_fwd_factor: nan }"),
              HasSubstr("recompute_fwd_factor: expected 0 to 1, got nan"));
  EXPECT_THAT(fault("wandb { group: \"\\377\" }"),
              HasSubstr("wandb.group: expected UTF-8"));
}

// A fault of what is absent stands where it would be.
TEST(DeepSpeed, MissingKeysHaveTheirSectionsPosition) {
  EXPECT_THAT(
      ParseConfig("{\"train_batch_size\": 8,\n \"optimizer\": {\"params\": "
                  "{\"lr\": 1}}}",
                  "f.json", 1),
      StatusIs(StatusCode::kInvalidArgument,
               "f.json:2:15: optimizer.type: missing: expected Adam, AdamW or "
               "another"));
}

TEST(DeepSpeed, SecondShardsDivideTheWorld) {
  EXPECT_EQ(ZeroFault("\"zero_hpz_partition_size\": 4", 8), "OK");
  EXPECT_EQ(ZeroFault("\"zero_hpz_partition_size\": 3", 8),
            "zero_optimization.zero_hpz_partition_size: expected a divisor of "
            "the world size 8, got 3");
}

TEST(DeepSpeed, OverlapIsTrueAtStage3Only) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const char* more : {"", ", \"overlap_comm\": null"}) {
      const ConfigReport report = ReportOf(absl::StrCat(
          "\"zero_optimization\": {\"stage\": ", stage, more, "}"));
      EXPECT_EQ(report.config.zero_optimization().overlap_comm(), stage == 3);
    }
  }
}

// A configuration that parses may still ask for more than this version does.
TEST(DeepSpeed, MissingFeaturesAreRefusedWhereTheyWouldRun) {
  const std::pair<const char*, const char*> cases[] = {
      {"\"zero_optimization\": {\"offload_optimizer\": {\"device\": "
       "\"cpu\", \"super_offload\": true}}",
       "zero_optimization.offload_optimizer.super_offload: true: "
       "SuperOffload"},
      {"\"zero_optimization\": {\"zenflow\": {}}",
       "zero_optimization.zenflow: ZenFlow"},
      {"\"zero_optimization\": {\"zero_quantized_weights\": true}",
       "zero_optimization.zero_quantized_weights: true: quantized gathers "
       "(ZeRO++)"},
      {"\"scheduler\": {\"type\": \"SequentialLR\"}",
       "scheduler.type: SequentialLR: use scheduler.warmup for steps before "
       "another schedule"},
      {"\"scheduler\": {\"type\": \"LambdaLR\"}",
       "scheduler.type: LambdaLR: call Engine::SetLearningRate before each "
       "Step "
       "instead"},
      {"\"tensor_parallel\": {\"autotp_size\": 2, "
       "\"partition_config\": {\"a\": 1}}",
       "tensor_parallel.partition_config: tp_plan says what is divided"},
      {"\"data_efficiency\": {\"enabled\": true}",
       "data_efficiency: DeepSpeed's data efficiency library"},
      {"\"hybrid_engine\": {\"enabled\": true}",
       "hybrid_engine: DeepSpeed's hybrid engine"},
  };
  for (const auto& [members, missing] : cases) {
    const ConfigReport report = ReportOf(members, 2);
    EXPECT_THAT(report.faults, IsEmpty()) << members;
    EXPECT_THAT(
        CheckRunnable(report.config),
        StatusIs(StatusCode::kUnimplemented,
                 absl::StrCat("not available in this version: ", missing)));
  }
  for (const char* members :
       {"\"zero_optimization\": {\"zenflow\": null, \"offload_param\": {}}",
        "\"scheduler\": null", "\"data_efficiency\": {\"enabled\": false}",
        "\"wandb\": {\"enabled\": false, \"project\": \"p\"}",
        "\"comet\": {\"workspace\": \"w\"}", "\"hybrid_engine\": {}",
        "\"sequence_parallel_size\": null",
        "\"tensor_parallel\": {\"autotp_size\": 1}",
        "\"data_efficiency\": {\"seed\": 1}",
        "\"zero_optimization\": {\"zero_hpz_partition_size\": 0}",
        "\"optimizer\": {}, \"scheduler\": {}"}) {
    TESSERA_EXPECT_OK(CheckRunnable(ReportOf(members).config)) << members;
  }
}

// A run is not refused for its logger.
TEST(DeepSpeed, LoggersThatAreNotHereAreOneWarning) {
  const auto notes = [](const char* members) {
    const ConfigReport report = ReportOf(members);
    EXPECT_THAT(report.faults, IsEmpty());
    TESSERA_EXPECT_OK(CheckRunnable(report.config));
    return NotesOf(members);
  };
  EXPECT_THAT(notes("\"wandb\": {\"enabled\": true, \"project\": \"p\", "
                    "\"team\": \"t\", \"group\": null}"),
              ElementsAre("wandb: has no effect: nothing is sent to Weights & "
                          "Biases: enable \"tensorboard\" too, and send its "
                          "folder there with wandb sync --sync-tensorboard"));
  EXPECT_THAT(notes("\"comet\": {\"enabled\": true}"),
              ElementsAre("comet: has no effect: nothing is sent to Comet: "
                          "enable \"tensorboard\" or \"jsonl_monitor\" too, "
                          "and import their files there"));
  EXPECT_THAT(notes("\"wandb\": {\"enabled\": false, \"project\": \"p\"}"),
              IsEmpty());
}

// DeepSpeed takes these for granted.
TEST(DeepSpeed, NonsenseThatItAcceptsIsRefused) {
  const std::pair<const char*, const char*> cases[] = {
      {"{\"train_batch_size\": 2.5}",
       "train_batch_size: expected an integer, got 2.5"},
      {"{\"train_batch_size\": true}",
       "train_batch_size: expected an integer, got true"},
      {"{\"train_batch_size\": 8, \"gradient_clipping\": -1}",
       "gradient_clipping: expected a finite number of at least 0, got -1: 0 "
       "is no clipping"},
      {"{\"train_batch_size\": 8, \"gradient_clipping\": null}",
       "gradient_clipping: expected a number, got null: leave the key out for "
       "its default"},
      {"{\"train_batch_size\": 8, \"fp16\": {\"hysteresis\": 0}}",
       "fp16.hysteresis: expected at least 1, got 0"},
      {"{\"train_batch_size\": 8, \"fp16\": {\"initial_scale_power\": -3}}",
       "fp16.initial_scale_power: expected 0 to 127, got -3"},
      {"{\"train_batch_size\": 8, \"gradient_predivide_factor\": 0}",
       "gradient_predivide_factor: expected a finite number above 0, got 0"},
      {"{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": true}}",
       "zero_optimization.stage: expected an integer or \"auto\", got true"},
      {"{\"train_batch_size\": 8, \"scheduler\": {\"type\": \"WarmupRL\"}}",
       "scheduler.type: expected a schedule of DeepSpeed or "
       "torch.optim.lr_scheduler, or WSD, "
       "got 'WarmupRL', did you mean 'WarmupLR'?"},
      {"{\"train_batch_size\": 8, \"train_batch_size\": 8}",
       "train_batch_size: duplicate key, first at 1:2"},
  };
  for (const auto& [json, fault] : cases) EXPECT_EQ(FaultOf(json), fault);
}

// DeepSpeed does the same and does not report it.
TEST(DeepSpeed, RatesOfGroupsThatASchedulerReplacesAreNoted) {
  const char* const optimizer =
      "\"optimizer\": {\"type\": \"AdamW\", \"param_groups\": [{\"name\": "
      "\"b\", \"parameters\": \"*.bias\", \"params\": {\"lr\": 0.1}}]}, ";
  EXPECT_THAT(NotesOf(absl::StrCat(optimizer,
                                   "\"scheduler\": {\"type\": \"WarmupLR\"}")),
              ElementsAre("optimizer.param_groups[0].params.lr: has no effect: "
                          "'WarmupLR' gives all groups one rate, by its own "
                          "parameters"));
  EXPECT_THAT(
      NotesOf(absl::StrCat(optimizer,
                           "\"scheduler\": {\"type\": \"StepLR\", \"params\": "
                           "{\"step_size\": 3}}")),
      ElementsAre());
}

}  // namespace
}  // namespace tessera
