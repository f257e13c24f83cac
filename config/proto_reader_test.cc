#include "config/reader/proto_reader.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "config/config.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Outcome {
  proto::Config config;
  ReadRecord record;
};

Outcome ReadText(absl::string_view json) {
  Outcome outcome;
  const absl::StatusOr<JsonValue> root = ReadJson(json, "f");
  TESSERA_EXPECT_OK(root) << json;
  if (root.ok()) ReadProtoFromJson(*root, &outcome.config, &outcome.record);
  return outcome;
}

// Returns "line:column path: what" for each fault.
std::vector<std::string> Faults(const ReadRecord& record) {
  std::vector<std::string> faults;
  for (const ConfigFault& fault : record.faults) {
    faults.push_back(absl::StrCat(fault.position->line, ":",
                                  fault.position->column, " ", fault.path, ": ",
                                  fault.what));
  }
  return faults;
}

std::vector<std::string> JsonFaults(absl::string_view json) {
  return Faults(ReadText(json).record);
}

TEST(ReadProtoFromJson, SetsEveryKindOfField) {
  const Outcome outcome = ReadText(R"({
    "train_batch_size": 5e1,
    "gradient_clipping": 0,
    "optimizer": {"type": "Adam",
                  "params": {"betas": [0.8, 0.9], "adam_w_mode": false}},
    "zero_optimization": {"stage": 3.0}})");
  EXPECT_THAT(Faults(outcome.record), IsEmpty());
  EXPECT_EQ(outcome.config.ShortDebugString(),
            "train_batch_size: 50 gradient_clipping: 0 "
            "optimizer { type: \"Adam\" params { betas: 0.8 betas: 0.9 "
            "adam_w_mode: false } } zero_optimization { stage: 3 }");
}

TEST(ReadProtoFromJson, RecordsPositions) {
  const Outcome outcome =
      ReadText("{\n \"optimizer\": {\"params\":\n  {\"betas\": [1, 2]}}}");
  const auto at = [&](const std::string& path) {
    return FormatPosition("", outcome.record.positions.at(path));
  };
  EXPECT_EQ(at("optimizer"), ":2:15");
  EXPECT_EQ(at("optimizer.params"), ":3:3");
  EXPECT_EQ(at("optimizer.params.betas"), ":3:13");
  EXPECT_EQ(at("optimizer.params.betas[1]"), ":3:17");
}

TEST(ReadProtoFromJson, UnknownKeysOfferTheNearestName) {
  EXPECT_THAT(JsonFaults(R"({"zero_optimization": {"stagee": 3}})"),
              ElementsAre("1:24 zero_optimization.stagee: unknown key, did you "
                          "mean 'stage'?"));
  EXPECT_THAT(JsonFaults(R"({"zero_optimisation": {"stage": 3}})"),
              ElementsAre("1:2 zero_optimisation: unknown key, did you mean "
                          "'zero_optimization'?"));
  EXPECT_THAT(JsonFaults(R"({"micro_batch_size_per_gpu": 3})"),
              ElementsAre("1:2 micro_batch_size_per_gpu: unknown key, did you "
                          "mean 'train_micro_batch_size_per_gpu'?"));
  EXPECT_THAT(
      JsonFaults(R"({"optimizer": {"params": {"beta": 1, "LR": 2}}})"),
      ElementsAre("1:27 optimizer.params.beta: unknown key, did you mean "
                  "'betas'?",
                  "1:38 optimizer.params.LR: unknown key, did you mean "
                  "'lr'?"));
}

TEST(ReadProtoFromJson, KeysInTheWrongPlaceAreSentToTheRightOne) {
  EXPECT_THAT(JsonFaults(R"({"stage": 3, "optimizer": {"lr": 1}})"),
              ElementsAre("1:2 stage: unknown key, did you mean "
                          "'zero_optimization.stage'?",
                          "1:28 optimizer.lr: unknown key, did you mean "
                          "'optimizer.params.lr'?"));
}

TEST(ReadProtoFromJson, FarNamesAreNotOffered) {
  for (const char* key :
       {"monitor", "printing", "untested", "activity", "enabled", "", "x"}) {
    EXPECT_THAT(JsonFaults(absl::StrCat("{\"", key, "\": 1}")),
                ElementsAre(absl::StrCat("1:2 ", key, ": unknown key")));
  }
}

TEST(ReadProtoFromJson, KeysAreEscapedInMessages) {
  EXPECT_THAT(JsonFaults("{\"a\\nb\": 1}"),
              ElementsAre("1:2 a\\nb: unknown key"));
}

TEST(ReadProtoFromJson, WrongTypesSayExpectedAndGot) {
  const auto fault = [](const char* key, const char* value) {
    const std::vector<std::string> faults =
        JsonFaults(absl::StrCat("{\"", key, "\": ", value, "}"));
    return faults.size() == 1 ? faults[0].substr(faults[0].find(": ") + 2)
                              : "not one fault";
  };
  EXPECT_EQ(fault("train_batch_size", "\"4\""),
            "expected an integer, got the string \"4\"");
  EXPECT_EQ(fault("train_batch_size", "2.5"), "expected an integer, got 2.5");
  EXPECT_EQ(fault("train_batch_size", "true"), "expected an integer, got true");
  EXPECT_EQ(fault("train_batch_size", "1e30"),
            "expected an integer of 64 bits, got 1e30");
  EXPECT_EQ(fault("train_batch_size", "9223372036854775808"),
            "expected an integer of 64 bits, got 9223372036854775808");
  EXPECT_EQ(fault("zero_optimization", "{\"stage\": -1e30}"),
            "expected an integer of 32 bits, got -1e30");
  EXPECT_EQ(fault("gradient_clipping", "null"),
            "expected a number, got null: leave the key out for its default");
  EXPECT_EQ(fault("gradient_clipping", "false"),
            "expected a number, got false");
  EXPECT_EQ(fault("gradient_clipping", "[1]"),
            "expected a number, got an array");
  EXPECT_EQ(fault("optimizer", "\"Adam\""),
            "expected an object, got the string \"Adam\"");
  EXPECT_EQ(fault("zero_optimization", "3"), "expected an object, got 3");
  EXPECT_EQ(fault("zero_optimization", "{\"stage\": 4294967296}"),
            "expected an integer of 32 bits, got 4294967296");
  EXPECT_EQ(fault("optimizer", "{\"type\": 1}"), "expected a string, got 1");
  EXPECT_EQ(fault("optimizer", "{\"params\": {\"adam_w_mode\": 1}}"),
            "expected true or false, got 1");
  EXPECT_EQ(fault("optimizer", "{\"params\": {\"betas\": 0.9}}"),
            "expected an array, got 0.9");
  EXPECT_EQ(fault("optimizer", "{\"params\": {\"betas\": [0.9, {}]}}"),
            "expected a number, got an object");
  EXPECT_EQ(fault("train_batch_size",
                  "\"0123456789012345678901234567890123456789x\""),
            "expected an integer, got the string "
            "\"0123456789012345678901234567890123456789...\"");
}

TEST(ReadProtoFromJson, RootMustBeAnObject) {
  EXPECT_THAT(JsonFaults("[1]"),
              ElementsAre("1:1 : expected an object, got an array"));
}

TEST(ReadProtoFromJson, AllFaultsAreRecordedAndTheRestIsRead) {
  const Outcome outcome = ReadText(
      R"({"train_batch_size": "x", "typo": 1, "gradient_clipping": 0,
          "optimizer": {"params": {"betas": [0.9, "b"], "eps": []}}})");
  EXPECT_THAT(Faults(outcome.record),
              ElementsAre(HasSubstr("train_batch_size"), HasSubstr("typo"),
                          HasSubstr("optimizer.params.betas[1]"),
                          HasSubstr("optimizer.params.eps")));
  EXPECT_TRUE(outcome.config.has_gradient_clipping());
  EXPECT_FALSE(outcome.config.has_train_batch_size());
}

TEST(ReadProtoFromText, SetsFieldsAndPositions) {
  Outcome outcome;
  ReadProtoFromText(
      "train_batch_size: 8\noptimizer {\n  params { betas: [0.8, 0.9] }\n}",
      &outcome.config, &outcome.record);
  EXPECT_THAT(Faults(outcome.record), IsEmpty());
  EXPECT_EQ(outcome.config.ShortDebugString(),
            "train_batch_size: 8 optimizer { params { betas: 0.8 betas: 0.9 } "
            "}");
  EXPECT_EQ(FormatPosition("", outcome.record.positions.at("optimizer")),
            ":2:1");
  EXPECT_EQ(FormatPosition(
                "", outcome.record.positions.at("optimizer.params.betas[1]")),
            ":3:12");
}

// Protobuf makes 0 and infinity of them.
TEST(ReadProtoFromText, NumbersThatADoubleCannotHoldAreFaults) {
  Outcome outcome;
  ReadProtoFromText(
      "# 1e-400 in a comment\ngradient_clipping: 1.5e-400f\n"
      "gradient_clipping_norm: 1e999\noptimizer { type: '1e999'\n"
      "  params { lr: 0e-400 eps: -1e-999 } }",
      &outcome.config, &outcome.record);
  EXPECT_THAT(
      Faults(outcome.record),
      ElementsAre("2:20 : the number 1.5e-400 is too small: as a double "
                  "it is 0; write 0 if that is meant",
                  "3:25 : the number 1e999 is too large: a double is at "
                  "most 1.8e308",
                  "5:29 : the number 1e-999 is too small: as a double "
                  "it is 0; write 0 if that is meant"));
}

TEST(ReadProtoFromText, FaultsHavePositions) {
  Outcome outcome;
  ReadProtoFromText("zero_optimization {\n  stagee: 3\n}", &outcome.config,
                    &outcome.record);
  EXPECT_THAT(Faults(outcome.record),
              ElementsAre("2:9 : Message type \"tessera.proto.ZeroOptimization"
                          "\" has no field named \"stagee\"."));
}

}  // namespace
}  // namespace tessera
