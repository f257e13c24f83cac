#include "tools/plan_command.h"

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "base/command/command_line.h"
#include "config/reader/json_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/separate_commands.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class PlanCommandTest : public ::testing::Test {
 protected:
  PlanCommandTest()
      : config_(std::string(std::getenv("TEST_TMPDIR")) + "/plan.json") {
    std::ofstream(config_) << R"({"train_micro_batch_size_per_gpu": 2,
      "bf16": {"enabled": true}, "optimizer": {"type": "AdamW"},
      "zero_optimization": {"stage": 3}})";
  }
  int Run(std::vector<std::string> args) {
    out_.str("");
    err_.str("");
    args.insert(args.begin(), "plan");
    return CommandLine("tessera", {PlanCommand(RunPlan)})
        .Run(args, &out_, &err_);
  }
  std::string config_;
  std::ostringstream out_, err_;
};

TEST_F(PlanCommandTest, PrintsATable) {
  EXPECT_EQ(Run({"--config", config_, "--world", "64", "--memory=10", "--model",
                 "gpt:dim=4096,layers=32,heads=32,seq=2048,vocab=50000"}),
            0)
      << err_.str();
  EXPECT_THAT(out_.str(),
              AllOf(HasSubstr("6.86 billion parameters"), HasSubstr("64 ranks"),
                    HasSubstr("\n> 3 "), HasSubstr("10.0 GiB each"),
                    HasSubstr("no stage fits")));
  EXPECT_EQ(Run({"--config", config_, "--model", "llama:layers=2"}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("stage 0 is the lowest that fits"));
}

TEST_F(PlanCommandTest, TimesOfAStep) {
  EXPECT_EQ(
      Run({"--config", config_, "--model", "gpt:layers=2", "--world", "4"}), 0);
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("samples/s"),
                                HasSubstr("nothing is known of collectives")));
  EXPECT_EQ(Run({"--config", config_, "--model", "gpt:layers=2", "--world", "4",
                 "--network", "25", "--latency=5", "--tflops=400",
                 "--bandwidth=2000"}),
            0);
  // 1.5 GB through each link, and 6 messages.
  EXPECT_THAT(out_.str(),
              HasSubstr("by rates of 400 Tflop/s, 2000 GB/s of memory, an "
                        "all-reduce of 1 GB in 0.06003 s"));
  EXPECT_EQ(Run({"--network", "0"}), 2);
  EXPECT_THAT(err_.str(), HasSubstr("--network: expected a number above 0"));
  EXPECT_EQ(Run({"--help"}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("--bandwidth"));
}

TEST_F(PlanCommandTest, OfAModelOfHuggingFaceAndForPrograms) {
  const std::string model =
      std::string(std::getenv("TEST_TMPDIR")) + "/config.json";
  std::ofstream(model) << R"({"model_type": "llama", "vocab_size": 1000,
      "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
      "num_attention_heads": 4, "num_key_value_heads": 2})";
  ASSERT_EQ(Run({"--config", config_, "--model", model + ":seq=32", "--world",
                 "4", "--json"}),
            0)
      << err_.str();
  const absl::StatusOr<JsonValue> json = ReadJson(out_.str(), "");
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(json->members.size(), 2u);  // the help of --json names them
  EXPECT_EQ(json->Find("auto")->kind, JsonKind::kNull);
  const JsonValue& plan = *json->Find("plan");
  EXPECT_EQ(plan.Find("world_size")->number, 4);
  ASSERT_EQ(plan.Find("stages")->elements.size(), 4u);
  const JsonValue& stage = plan.Find("stages")->elements[3];
  double sum = 0;
  for (const JsonMember& kind : stage.Find("peak_bytes")->members) {
    if (kind.key != "total") sum += kind.value.number;
  }
  EXPECT_EQ(stage.Find("peak_bytes")->Find("total")->number, sum);
  EXPECT_GT(sum, 0);
  // Nothing is known of the network.
  EXPECT_EQ(stage.Find("seconds")->Find("communication")->kind,
            JsonKind::kNull);
}

TEST_F(PlanCommandTest, ABusyHostIsMeasuredTooSlow) {
  EXPECT_EQ(BusyNote(0.9, 2), "");
  EXPECT_EQ(BusyNote(3.9, 8), "");
  EXPECT_THAT(BusyNote(1.5, 2),
              AllOf(HasSubstr("1.5 processes run on its 2 processors"),
                    HasSubstr("--tflops")));
  EXPECT_THAT(BusyNote(9, 8), HasSubstr("9.0 processes"));
}

TEST_F(PlanCommandTest, FaultsOfTheCommand) {
  EXPECT_EQ(Run({}), 2);
  EXPECT_THAT(err_.str(), HasSubstr("--config and --model are needed"));
  EXPECT_EQ(Run({"--world", "0"}), 2);
  EXPECT_THAT(
      err_.str(),
      HasSubstr("--world: expected a number from 1 to 1000000, got '0'"));
  EXPECT_EQ(Run({"--memory=much"}), 2);
  EXPECT_THAT(err_.str(), HasSubstr("--memory: expected a number above 0"));
  EXPECT_EQ(Run({"--config"}), 2);
  EXPECT_THAT(err_.str(), HasSubstr("--config needs a value"));
  EXPECT_EQ(Run({"--size", "7"}), 2);
  EXPECT_THAT(err_.str(), HasSubstr("unknown flag --size"));
}

TEST_F(PlanCommandTest, FaultsOfConfigurationAndModel) {
  EXPECT_EQ(Run({"--config", "/none.json", "--model", "gpt:"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("/none.json"));
  EXPECT_EQ(Run({"--config", config_, "--model", "gpt:width=3"}), 1);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("unknown 'width'"),
                                HasSubstr("dim, heads, layers, seq, vocab")));
  EXPECT_EQ(Run({"--config", config_, "--model", "gpt:dim=many"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("expected dim of at least 1, got 'many'"));
  EXPECT_EQ(Run({"--config", config_, "--model", "bert:"}), 1);
  EXPECT_THAT(err_.str(),
              HasSubstr("expected gpt:..., llama:... or the config.json"));
  EXPECT_EQ(Run({"--config", config_, "--model", "gpt:dim=100,heads=3"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("dim 100 is not a multiple of heads 3"));
}

}  // namespace
}  // namespace tessera
