// Tests the sections about ranks that have no samples of their own: parts of
// layers, stages of a pipeline, parts of sequences.
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

std::string With(absl::string_view members) {
  return Json(absl::StrCat("\"train_batch_size\": 8, ", members));
}

ConfigReport ReportOf(absl::string_view members, int world_size) {
  const absl::StatusOr<ConfigReport> report =
      ReadConfig(With(members), "f.json", world_size);
  EXPECT_TRUE(report.ok()) << report.status();
  return report.ok() ? *report : ConfigReport();
}

std::string Pipeline(absl::string_view members) {
  return absl::StrCat("\"pipeline\": {", members, "}");
}

std::vector<std::string> NotesOf(absl::string_view members, int world_size) {
  const ConfigReport report = ReportOf(members, world_size);
  EXPECT_THAT(report.faults, IsEmpty()) << members;
  std::vector<std::string> notes;
  for (const ConfigFault& note : report.notes) {
    notes.push_back(absl::StrCat(note.path, ": ", note.what));
  }
  return notes;
}

TEST(Parallel, SequencesTakeRanksFromTheBatch) {
  const ConfigReport report = ReportOf("\"sequence_parallel_size\": 2", 4);
  EXPECT_EQ(report.config.train_micro_batch_size_per_gpu(), 4);
  EXPECT_EQ(FaultOf(With("\"sequence_parallel_size\": 3"), 4),
            "sequence_parallel_size: expected a divisor of the world size 4, "
            "got 3");
}

TEST(Parallel, RanksThatDivideLayersHaveNoSamplesOfTheirOwn) {
  const ConfigReport report =
      ReportOf("\"tensor_parallel\": {\"autotp_size\": 2}", 4);
  EXPECT_EQ(report.config.train_micro_batch_size_per_gpu(), 4);
  TESSERA_EXPECT_OK(CheckRunnable(report.config));
  EXPECT_EQ(TensorRanksOf(report.config), 2);
  EXPECT_EQ(FaultOf(With("\"tensor_parallel\": {\"autotp_size\": 3}"), 4),
            "tensor_parallel.autotp_size: expected a divisor of the world size "
            "4, got 3");
  EXPECT_EQ(FaultOf(With("\"tensor_parallel\": {\"autotp_size\": 2}, "
                         "\"sequence_parallel_size\": 4"),
                    4),
            "sequence_parallel_size: expected a divisor of the world size 4 / "
            "2, got 4");
}

TEST(Parallel, StagesHaveNoSamplesOfTheirOwn) {
  const ConfigReport report =
      ReportOf(absl::StrCat(Pipeline("\"stages\": 2"),
                            ", \"gradient_accumulation_steps\": 4"),
               4);
  EXPECT_THAT(report.faults, IsEmpty());
  EXPECT_THAT(report.notes, IsEmpty());
  EXPECT_EQ(report.config.train_micro_batch_size_per_gpu(), 1);
  EXPECT_EQ(PipelineRanksOf(report.config), 2);
  EXPECT_EQ(report.config.pipeline().partition(), "best");
  EXPECT_EQ(report.config.pipeline().schedule(), "1f1b");
  TESSERA_EXPECT_OK(CheckRunnable(report.config));
  TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config again,
                               ResolveConfig(report.config, 4));
  EXPECT_EQ(again.SerializeAsString(), report.config.SerializeAsString());
}

TEST(Parallel, StagesThatAreNoneChangeNothing) {
  for (const char* members :
       {"\"bf16\": {}", "\"pipeline\": {}", "\"pipeline\": {\"stages\": 0}",
        "\"pipeline\": {\"stages\": 1, \"schedule\": \"gpipe\"}"}) {
    const ConfigReport report = ReportOf(members, 4);
    EXPECT_THAT(report.faults, IsEmpty()) << members;
    EXPECT_THAT(report.notes, IsEmpty()) << members;
    EXPECT_EQ(PipelineRanksOf(report.config), 1) << members;
    EXPECT_EQ(report.config.train_micro_batch_size_per_gpu(), 2) << members;
  }
}

TEST(Parallel, FaultsOfPipelinesAreNamed) {
  const std::pair<std::string, const char*> cases[] = {
      {Pipeline("\"stages\": 3"),
       "pipeline.stages: expected a divisor of the world size 4, got 3"},
      {Pipeline("\"stages\": 8"),
       "pipeline.stages: expected a divisor of the world size 4, got 8"},
      {absl::StrCat("\"tensor_parallel\": {\"autotp_size\": 2}, ",
                    Pipeline("\"stages\": 4")),
       "pipeline.stages: expected a divisor of the world size 4 / 2, got 4"},
      {absl::StrCat(Pipeline("\"stages\": 2"),
                    ", \"sequence_parallel_size\": 4"),
       "sequence_parallel_size: expected a divisor of the world size 4 / 2, "
       "got 4"},
      {Pipeline("\"stages\": -1"),
       "pipeline.stages: expected at least 0, got -1"},
      {Pipeline("\"partition\": \"type:transformer\""),
       "pipeline.partition: expected best, parameters or uniform, got "
       "'type:transformer'"},
      {Pipeline("\"schedule\": \"interleaved\""),
       "pipeline.schedule: expected 1f1b or gpipe, got 'interleaved'"},
      {Pipeline("\"stages\": 4, \"split_points\": [\"a\"]"),
       "pipeline.split_points: expected pipeline.stages - 1 names, at which "
       "the second and each further stage begins: 3, got 1"},
      {Pipeline("\"num_stages\": 2"), "pipeline.num_stages: unknown key"},
  };
  for (const auto& [members, fault] : cases) {
    EXPECT_THAT(FaultOf(With(members), 4), HasSubstr(fault)) << members;
  }
  EXPECT_THAT(
      FaultOf(With(Pipeline("\"stages\": 2, \"split_points\": [\"\"]")), 4),
      HasSubstr("pipeline.split_points"));
}

// Configurations as DeepSpeed's examples and programs have them.
TEST(Parallel, DeepSpeedsPipelinesAreAccepted) {
  const char* const defaults =
      "\"pipeline\": {\"stages\": \"auto\", \"partition\": \"best\", "
      "\"seed_layers\": false, \"activation_checkpoint_interval\": 0, "
      "\"pipe_partitioned\": true, \"grad_partitioned\": true}";
  EXPECT_THAT(
      NotesOf(defaults, 4),
      ElementsAre(
          "pipeline.stages: \"auto\" is its default here",
          HasSubstr("pipeline.seed_layers: has no effect"),
          HasSubstr("pipeline.activation_checkpoint_interval: has no effect"),
          HasSubstr("pipeline.pipe_partitioned: has no effect"),
          HasSubstr("pipeline.grad_partitioned: has no effect")));
  EXPECT_EQ(PipelineRanksOf(ReportOf(defaults, 4).config), 1);

  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ParseConfig("{\"train_batch_size\": 256,"
                  " \"train_micro_batch_size_per_gpu\": 4,"
                  " \"zero_optimization\": {\"stage\": 1},"
                  " \"bf16\": {\"enabled\": true},"
                  " \"pipeline\": {\"stages\": 4, \"partition\": \"uniform\","
                  " \"seed_layers\": true, \"use_reentrant\": null,"
                  " \"activation_checkpoint_interval\": 1}}",
                  "f.json", 8));
  EXPECT_EQ(config.gradient_accumulation_steps(), 32);
  EXPECT_EQ(PipelineRanksOf(config), 4);
  TESSERA_EXPECT_OK(CheckRunnable(config));
}

TEST(Parallel, PipelinesThatIdleAreNoted) {
  EXPECT_THAT(NotesOf(Pipeline("\"stages\": 4"), 4),
              ElementsAre("pipeline.stages: gradient_accumulation_steps is 1, "
                          "so the stages compute one at a time: each is idle "
                          "for 75 % of a batch, and for 15 % with 16"));
  EXPECT_THAT(NotesOf(Pipeline("\"split_points\": [\"a\"]"), 4),
              ElementsAre("pipeline.split_points: has no effect: "
                          "pipeline.stages is 0"));
}

TEST(Parallel, PartsOfSequencesAreARank) {
  const ConfigReport report = ReportOf("\"sequence_parallel_size\": 2", 4);
  EXPECT_EQ(SequenceRanksOf(report.config), 2);
  TESSERA_EXPECT_OK(CheckRunnable(report.config));
  for (const auto& [other, why] :
       {std::pair("\"tensor_parallel\": {\"autotp_size\": 2}",
                  "tensor_parallel.autotp_size above 1"),
        std::pair("\"pipeline\": {\"stages\": 2}",
                  "pipeline.stages above 1")}) {
    EXPECT_THAT(
        CheckRunnable(
            ReportOf(absl::StrCat("\"sequence_parallel_size\": 2, ", other), 8)
                .config),
        StatusIs(StatusCode::kUnimplemented,
                 absl::StrCat("not available in this version: "
                              "sequence_parallel_size: 2: parts of sequences "
                              "with ",
                              why)));
  }
}

TEST(Parallel, StagesOfDividedLayersAreRefusedWhereTheyWouldRun) {
  const ConfigReport report =
      ReportOf(absl::StrCat("\"tensor_parallel\": {\"autotp_size\": 2}, ",
                            Pipeline("\"stages\": 2")),
               8);
  EXPECT_THAT(report.faults, IsEmpty());
  EXPECT_EQ(report.config.train_micro_batch_size_per_gpu(), 4);
  EXPECT_THAT(CheckRunnable(report.config),
              StatusIs(StatusCode::kUnimplemented,
                       "not available in this version: pipeline.stages: 2: "
                       "stages with tensor_parallel.autotp_size above 1"));
}

}  // namespace
}  // namespace tessera
