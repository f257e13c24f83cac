// Keys that the schema does not have: comments, errors, or warnings.
#include <fstream>
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
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

struct Said {
  std::vector<std::string> faults, notes;
};

Said ReadText(absl::string_view text, absl::string_view file = "f.json") {
  const absl::StatusOr<ConfigReport> report = ReadConfig(text, file, 1);
  EXPECT_TRUE(report.ok()) << report.status();
  Said said;
  if (!report.ok()) return said;
  for (const ConfigFault& fault : report->faults) {
    said.faults.push_back(FormatFault(fault, file));
  }
  for (const ConfigFault& note : report->notes) {
    said.notes.push_back(FormatFault(note, file));
  }
  return said;
}

TEST(Comments, MayStandAtAnyLevel) {
  const Said said = ReadText(R"({
    "_comment": "before all", "//": "x", "# what": [1], "comment": {"a": 1},
    "train_batch_size": 8, "_old": {"train_batch_size": 9, "stag": 1},
    "optimizer": {"//type": "SGD", "type": "Adam",
                  "params": {"comment": 1, "lr": 0.5, "_lr": "high"}},
    "zero_optimization": {"#stage": 3, "stage": 2},
    "communication": {"nccl": {"_comment": 1, "NCCL_DEBUG": "INFO"}}})");
  EXPECT_THAT(said.faults, IsEmpty());
  EXPECT_THAT(said.notes, IsEmpty());
}

TEST(Comments, AreNotWhatLooksLikeThem) {
  for (const char* key : {"comments", "Comment", "/", "stage_", " _x"}) {
    EXPECT_THAT(FaultOf(Json(
                    absl::StrCat("\"train_batch_size\": 8, \"", key, "\": 1"))),
                HasSubstr("unknown key"))
        << key;
  }
}

TEST(UnknownKeys, TheRefusalSaysOnceHowToGoOn) {
  EXPECT_THAT(
      ReadText("{\"train_batch_size\": 8,\n \"stag\": 1, \"x\": {}}").faults,
      ElementsAre("f.json:2:2: stag: unknown key",
                  "f.json:2:13: x: unknown key (\"unknown_keys\": "
                  "\"warn\" ignores such keys)"));
  EXPECT_THAT(ReadText("train_batch_size: 8 stag: 1", "f.pbtxt").faults,
              ElementsAre(AllOf(HasSubstr("\"stag\""),
                                EndsWith("(unknown_keys: \"warn\" ignores such "
                                         "keys)"))));
}

TEST(UnknownKeys, WarningsNameEachWithItsPlace) {
  const Said said = ReadText(
      "{\"stag\": 1,\n"
      " \"zero_optimization\": {\"stagee\": 3, \"stage\": 2},\n"
      " \"bf16\": {\"loss_scale\": 0},\n"
      " \"train_batch_size\": 8, \"unknown_keys\": \"warn\"}");
  EXPECT_THAT(said.faults, IsEmpty());
  EXPECT_THAT(said.notes,
              ElementsAre("f.json:1:2: stag: ignored: unknown key",
                          "f.json:2:24: zero_optimization.stagee: ignored: "
                          "unknown key, did you mean 'stage'?",
                          "f.json:3:11: bf16.loss_scale: ignored: unknown "
                          "key, did you mean 'fp16.loss_scale'?"));
}

TEST(UnknownKeys, WarningsInText) {
  const Said said = ReadText(
      "stag: 1\nzero_optimization { stagee: 2 stage: 1 }\n"
      "train_batch_size: 8 unknown_keys: \"warn\"",
      "f.textproto");
  EXPECT_THAT(said.faults, IsEmpty());
  EXPECT_THAT(said.notes,
              ElementsAre(AllOf(HasSubstr("f.textproto:1:"),
                                HasSubstr("ignored: "), HasSubstr("\"stag\"")),
                          HasSubstr("\"stagee\"")));
}

TEST(UnknownKeys, OtherFaultsStayFaults) {
  EXPECT_THAT(ReadText("{\"unknown_keys\": \"warn\", \"x\": 1,\n"
                       " \"train_batch_siz\": 8, \"amp\": {},\n"
                       " \"zero_optimization\": {\"stage\": 7}}")
                  .faults,
              ElementsAre(HasSubstr(":2:24: amp: refused"),
                          HasSubstr(":3:33: zero_optimization.stage: expected"),
                          HasSubstr("train_batch_size: missing")));
  EXPECT_THAT(ReadText("{\"unknown_keys\": \"warm\", \"x\": 1,\n"
                       " \"train_batch_size\": 8}")
                  .faults,
              ElementsAre("f.json:1:18: unknown_keys: expected error or warn, "
                          "got 'warm', did you mean 'warn'?",
                          HasSubstr("x: unknown key")));
}

// Other programs write these at the top level, where DeepSpeed ignores them.
TEST(UnknownKeys, OfOthersAreWarningsByDefault) {
  const Said said = ReadText(R"({"train_batch_size": 8,
    "cuda_visible_devices": "0,1",
    "monitor_config": {"enabled": true, "csv_monitor": {"enabled": true}},
    "log": {"steps_per_print": 5},
    "comms_config": {"comms_logger": {"enabled": true}},
    "zero3_init_flag": true, "report_to": "wandb", "save_steps": 500})");
  EXPECT_THAT(said.faults, IsEmpty());
  EXPECT_THAT(
      said.notes,
      ElementsAre(
          "f.json:2:5: cuda_visible_devices: ignored: a launcher's: "
          "ranks, hosts and devices are what this run was started with",
          "f.json:3:5: monitor_config: ignored: DeepSpeed ignores it, "
          "too: write \"tensorboard\", \"csv_monitor\" or "
          "\"jsonl_monitor\" at the top level",
          AllOf(HasSubstr(":4:5: log: ignored"), HasSubstr("steps_per_print")),
          AllOf(HasSubstr(":5:5: comms_config: ignored"),
                HasSubstr("comms_logger")),
          HasSubstr("6:5: zero3_init_flag: ignored: Accelerate's"),
          HasSubstr("report_to: ignored: a logger's"),
          HasSubstr("save_steps: ignored: a trainer's")));
}

// A key that says what is computed is none of those, nor one that is near ours,
// nor any where errors are asked for, or elsewhere.
TEST(UnknownKeys, ThatSayWhatIsComputedStayErrors) {
  for (const char* key :
       {"seed", "batch_size", "micro_batch_size_per_gpu", "max_grad_norms",
        "learning_rate", "zero_optimisation", "tensor_parallel_size",
        "weight-decay", "num-layers", "lr_scheduler_type", "max_steps",
        "num_train_epochs", "mixed_precision", "gradient_checkpointing",
        "offload_optimizer", "steps_per_prin", "cuda_visible_device"}) {
    EXPECT_THAT(FaultOf(Json(
                    absl::StrCat("\"train_batch_size\": 8, \"", key, "\": 1"))),
                HasSubstr("unknown key"))
        << key;
  }
  EXPECT_THAT(FaultOf(Json("\"train_batch_size\": 8, \"unknown_keys\": "
                           "\"error\", \"cuda_visible_devices\": \"0\"")),
              HasSubstr("cuda_visible_devices: unknown key"));
  EXPECT_THAT(FaultOf(Json("\"train_batch_size\": 8, \"fp16\": {\"log\": 1}")),
              HasSubstr("fp16.log: unknown key"));
  EXPECT_THAT(ReadText("train_batch_size: 8 log: 1", "f.pbtxt").faults,
              ElementsAre(HasSubstr("\"log\"")));
}

TEST(UnknownKeys, AProgramMayIgnoreThemToo) {
  const std::string path = absl::StrCat(testing::TempDir(), "/unknown.json");
  std::ofstream(path) << "{\"train_batch_size\": 8,\n \"stag\": 1,\n"
                         " \"communication\": {\"backends\": 1, \"backend\": "
                         "\"gloo\"}}";
  EXPECT_THAT(LoadConfig(path, 1), StatusIs(StatusCode::kInvalidArgument));
  testing::internal::CaptureStderr();
  const auto config = LoadConfig(path, 1, {}, /*ignore_unknown=*/true);
  const auto again = LoadConfig(path, 1, {}, /*ignore_unknown=*/true);
  const std::string log = testing::internal::GetCapturedStderr();
  TESSERA_EXPECT_OK(config);
  TESSERA_EXPECT_OK(again);
  const std::string first = absl::StrCat(path, ":2:2: stag: ignored: unknown");
  EXPECT_THAT(log, AllOf(HasSubstr(first),
                         HasSubstr(absl::StrCat(
                             path, ":3:20: communication.backends: ignored"))));
  EXPECT_THAT(log.substr(log.find(first) + 1), Not(HasSubstr(first)));

  EXPECT_THAT(LoadCommunication(path),
              StatusIs(StatusCode::kInvalidArgument,
                       EndsWith("communication.backends: unknown key, did you "
                                "mean 'backend'? (\"unknown_keys\": \"warn\" "
                                "ignores such keys)")));
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Communication section,
      LoadCommunication(path, /*ignore_unknown=*/true));
  EXPECT_EQ(section.backend(), "gloo");
}

// The key takes one name or several; "auto" counts as a name.
TEST(ActivationCheckpointing, NamesUnits) {
  for (const auto& [json, names] :
       std::vector<std::pair<std::string, std::vector<std::string>>>{
           {R"("GptBlock")", {"GptBlock"}},
           {R"("auto")", {"auto"}},
           {R"(["Encoder", "Decoder"])", {"Encoder", "Decoder"}}}) {
    TESSERA_ASSERT_OK_AND_ASSIGN(
        const proto::Config config,
        ParseConfig(
            absl::StrCat(
                R"({"train_batch_size": 1, "activation_checkpointing": {"units": )",
                json, "}}"),
            "f.json", 1));
    const auto& units = config.activation_checkpointing().units();
    EXPECT_EQ(std::vector<std::string>(units.begin(), units.end()), names);
  }
}

}  // namespace
}  // namespace tessera
