#include "config/command.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/command/command_line.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "config/config.h"
#include "config/config_report.h"
#include "config/config_text.h"
#include "config/describe.h"
#include "config/reader/json_reader.h"
#include "gmock/gmock.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

struct Answer {
  int status = 0;
  std::string out, err;
};

Answer Tessera(const std::vector<std::string>& args) {
  std::ostringstream out, err;
  Answer answer;
  std::vector<std::string> words = {"config"};
  words.insert(words.end(), args.begin(), args.end());
  answer.status =
      CommandLine("tessera", ConfigCommands()).Run(words, &out, &err);
  answer.out = out.str();
  answer.err = err.str();
  return answer;
}

std::string FileOf(const std::string& name, const std::string& text) {
  const std::string path = absl::StrCat(::testing::TempDir(), name);
  std::ofstream(path) << text;
  return path;
}

// The least that a DeepSpeed user begins with.
constexpr char kSeed[] =
    "{\"zero_optimization\":{\"stage\":2,\"offload_optimizer\":{\"device\":"
    "\"cpu\"},\"allgather_partitions\":true,\"reduce_scatter\":true},\"fp16\":"
    "{\"enabled\":true},\"train_batch_size\":64,"
    "\"train_micro_batch_size_per_gpu\":8}";

TEST(ConfigCommand, CheckPrintsWhatTheFileComesTo) {
  const std::string path = FileOf("seed.json", kSeed);
  for (const auto& [world, steps] : {std::pair("1", 8), std::pair("2", 4),
                                     std::pair("4", 2), std::pair("8", 1)}) {
    const Answer answer = Tessera({"check", path, "--world", world, "--all"});
    EXPECT_EQ(answer.status, 0) << answer.err;
    EXPECT_THAT(
        answer.out,
        AllOf(StartsWith(absl::StrCat("# on ", world, " rank")),
              HasSubstr("train_batch_size: 64\n"),
              HasSubstr(absl::StrCat("gradient_accumulation_steps: ", steps,
                                     "  # resolved\n")),
              HasSubstr("gradient_clipping: 1  # default\n"),
              HasSubstr("  stage: 2\n"), HasSubstr("    device: \"cpu\"\n"),
              HasSubstr("    pin_memory: true  # default\n")));
    EXPECT_THAT(answer.err,
                AllOf(HasSubstr("note: "), HasSubstr("allgather_partitions"),
                      Not(HasSubstr("Engine::Create refuses this"))));
  }
}

TEST(ConfigCommand, FaultsGoToTheOtherStream) {
  const std::string path =
      FileOf("bad.json", "{\"train_batch_size\": 33,\n \"stag\": 1}");
  const Answer answer = Tessera({"check", path, "--world=8"});
  EXPECT_EQ(answer.status, 1);
  EXPECT_EQ(answer.out, "");
  EXPECT_EQ(answer.err,
            absl::StrCat(path,
                         ":1:22: train_batch_size: expected "
                         "train_micro_batch_size_per_gpu (absent) * "
                         "gradient_accumulation_steps 1 * world size 8, got "
                         "33; 32 and 40 would work\n",
                         path,
                         ":2:2: stag: unknown key (\"unknown_keys\": \"warn\" "
                         "ignores such keys)\n"));
  EXPECT_EQ(Tessera({"check", "/nowhere/x.json"}).err,
            "/nowhere/x.json: No such file or directory\n");
  EXPECT_EQ(Tessera({"check", FileOf("half.json", "{")}).status, 1);
}

// What a reader wants first, and what the file changes.
TEST(ConfigCommand, CheckIsShort) {
  const std::string path = FileOf(
      "short.json",
      "{\"train_batch_size\": 64, \"train_micro_batch_size_per_gpu\": 8,\n"
      "\"gradient_clipping\": 1.0, \"bf16\": {\"enabled\": true},\n"
      "\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 3e-4}},\n"
      "\"zero_optimization\": {\"stage\": 3}}");
  const Answer answer = Tessera({"check", path, "--world", "2"});
  EXPECT_EQ(answer.status, 0) << answer.err;
  EXPECT_THAT(answer.out,
              AllOf(StartsWith(absl::StrCat(
                        path,
                        ": OK, 2 ranks, batch 64 = 8 x 4 x 2, stage 3, bf16, "
                        "AdamW lr 0.0003, clip 1\n")),
                    HasSubstr("  zero_optimization.stage: 3\n"),
                    HasSubstr("  optimizer.params.lr: 0.0003\n"),
                    HasSubstr("  gradient_accumulation_steps: 4  # resolved\n"),
                    HasSubstr(" other values are not in the file: --all)\n")));
  const auto lines = std::count(answer.out.begin(), answer.out.end(), '\n');
  EXPECT_LE(lines, 15) << answer.out;
}

TEST(ConfigCommand, CheckSaysWhenCheckpointsAreSaved) {
  const std::pair<const char*, const char*> cases[] = {
      {R"("every_steps": 500, "every_minutes": 10, "folder": "run7")",
       ", saves every 500 steps or 10 min to run7\n"},
      {R"("every_minutes": 2.5)", ", saves every 2.5 min\n"},
      {R"("folder": "run7")", ", saves to run7\n"},
      {R"("async": true)", ", clip 1\n"}};
  for (const auto& [section, said] : cases) {
    const std::string path =
        FileOf("cadence.json", absl::StrCat("{\"train_batch_size\": 8, "
                                            "\"checkpoint\": {",
                                            section, "}}"));
    EXPECT_THAT(Tessera({"check", path}).out, HasSubstr(said)) << section;
  }
  EXPECT_THAT(Tessera({"explain", "checkpoint.every_steps"}).out,
              HasSubstr("multiples of this"));
}

TEST(ConfigCommand, FaultsAndDifferencesMayBeJson) {
  const std::string bad = FileOf("bad.json", "{\n \"stag\": 1}");
  const Answer faults = Tessera({"check", bad, "--json"});
  EXPECT_EQ(faults.status, 1);
  TESSERA_ASSERT_OK_AND_ASSIGN(const JsonValue json, ReadJson(faults.out, ""));
  const JsonValue& fault = json.Find("faults")->elements.at(0);
  EXPECT_EQ(fault.Find("path")->text, "stag");
  EXPECT_EQ(fault.Find("line")->number, 2);
  EXPECT_EQ(fault.Find("column")->number, 2);
  const std::string a = FileOf("a.json", "{\"train_batch_size\": 8}");
  const std::string b =
      FileOf("b.json",
             "{\"train_batch_size\": 8, \"optimizer\": {\"type\": \"SGD\"}}");
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const JsonValue differences,
      ReadJson(Tessera({"diff", a, b, "--json"}).out, ""));
  EXPECT_EQ(differences.Find("optimizer.type")->elements.at(1).text, "SGD");
  EXPECT_EQ(Tessera({"diff", a, a, "--json"}).out, "{}\n");
}

TEST(ConfigCommand, UnknownKeysMayBeIgnored) {
  const std::string path =
      FileOf("odd.json", "{\"train_batch_size\": 8,\n \"stag\": 1}");
  EXPECT_EQ(Tessera({"check", path}).status, 1);
  const Answer answer = Tessera({"check", path, "--ignore_unknown"});
  EXPECT_EQ(answer.status, 0);
  EXPECT_THAT(answer.err,
              HasSubstr(absl::StrCat("note: ", path,
                                     ":2:2: stag: ignored: unknown key\n")));
  EXPECT_EQ(Tessera({"diff", path, path, "--ignore_unknown"}).status, 0);
}

TEST(ConfigCommand, AutoValuesResolve) {
  const std::string path = FileOf(
      "auto.json",
      "{\"train_micro_batch_size_per_gpu\": \"auto\", \"gradient_clipping\": "
      "\"auto\"}");
  EXPECT_EQ(Tessera({"check", path}).status, 1);
  const Answer answer =
      Tessera({"check", path, "--world", "2", "--auto",
               "per_device_train_batch_size=3,max_grad_norm=0.5", "--json"});
  EXPECT_EQ(answer.status, 0) << answer.err;
  EXPECT_THAT(answer.out, AllOf(HasSubstr("\"train_batch_size\": 6,"),
                                HasSubstr("\"gradient_clipping\": 0.5,")));
}

TEST(ConfigCommand, DiffNamesWhatDiffers) {
  const std::string a = FileOf("a.json", "{\"train_batch_size\": 8}");
  const std::string b = FileOf(
      "b.json",
      "{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 3}}");
  const Answer answer = Tessera({"diff", a, b});
  EXPECT_EQ(answer.status, 1);
  EXPECT_EQ(answer.out,
            "zero_optimization.overlap_comm: false | true\n"
            "zero_optimization.stage: 0 | 3\n");
  EXPECT_EQ(Tessera({"diff", a, a}).status, 0);
}

TEST(ConfigCommand, ExplainFindsKeysByTheirEnd) {
  const Answer answer = Tessera({"explain", "max_live_parameters"});
  EXPECT_EQ(answer.status, 0);
  EXPECT_EQ(answer.out,
            "zero_optimization.stage3_max_live_parameters\n"
            "  integer, at least 0; default 1000000000\n"
            "  also written zero_optimization.max_live_parameters\n"
            "  Number of parameters that may be whole at a time at stage 3, in "
            "addition to those in use.\n"
            "  supported\n");
  EXPECT_THAT(Tessera({"explain", "amp"}).out, HasSubstr("refused: DeepSpeed"));
  EXPECT_THAT(Tessera({"explain", "enabled"}).out,
              AllOf(HasSubstr("fp16.enabled\n"), HasSubstr("bf16.enabled\n")));
  EXPECT_EQ(Tessera({"explain", "nothing"}).status, 1);
  EXPECT_THAT(Tessera({"explain", "gradient_cliping"}).err,
              HasSubstr("did you mean 'gradient_clipping'?"));
}

TEST(ConfigCommand, MisuseShowsHowToUseIt) {
  for (const std::vector<std::string>& args :
       std::vector<std::vector<std::string>>{{},
                                             {"chekc"},
                                             {"check"},
                                             {"check", "a", "b"},
                                             {"check", "a", "--wrld=2"},
                                             {"check", "a", "--world"},
                                             {"check", "a", "--world=0"},
                                             {"check", "a", "--auto=x=1"}}) {
    const Answer answer = Tessera(args);
    EXPECT_EQ(answer.status, 2);
    EXPECT_THAT(answer.err, HasSubstr("`tessera help config"));
  }
}

// Both printed forms can be read back to the same configuration.
TEST(ConfigText, ReadsBack) {
  for (const char* name : {"full.json", "zero3_fp16.json", "loose_syntax.json",
                           "minimal.textproto", "sharding.textproto"}) {
    const std::string path = absl::StrCat("config/testdata/", name);
    TESSERA_ASSERT_OK_AND_ASSIGN(const std::string text, ReadWholeFile(path));
    TESSERA_ASSERT_OK_AND_ASSIGN(const ConfigReport report,
                                 ReadConfig(text, path, 4));
    ASSERT_TRUE(report.faults.empty()) << path;
    const std::string json = ConfigToJson(report.config);
    TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config again,
                                 ParseConfig(json, "json", 4));
    EXPECT_EQ(ConfigToJson(again), json) << path;
    TESSERA_ASSERT_OK_AND_ASSIGN(
        const proto::Config from_text,
        ParseConfig(ConfigToText(report.config, report.written), "t.textproto",
                    4));
    EXPECT_EQ(ConfigToJson(from_text), json) << path;
  }
}

// The generated parts of the documentation: `tessera config tables`, `schema`.
TEST(Docs, AreThoseOfTheSchema) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const std::string page,
                               ReadWholeFile("docs/config.md"));
  constexpr char kBegin[] = "<!-- tessera config tables -->\n";
  const size_t begin = page.find(kBegin);
  ASSERT_NE(begin, page.npos);
  EXPECT_TRUE(page.substr(begin + strlen(kBegin)) == KeyTables())
      << "docs/config.md: replace what follows the mark by the output of "
         "`tessera config tables`";
  TESSERA_ASSERT_OK_AND_ASSIGN(const std::string schema,
                               ReadWholeFile("docs/config.schema.json"));
  EXPECT_TRUE(schema == JsonSchema())
      << "docs/config.schema.json: replace it by the output of `tessera config "
         "schema`";
}

TEST(Docs, EverySupportedKeyHasAComment) {
  for (const KeyDescription& key : DescribeKeys()) {
    if (key.support != "supported" || key.kind == "section") continue;
    EXPECT_FALSE(key.comment.empty()) << key.path;
  }
}

}  // namespace
}  // namespace tessera
