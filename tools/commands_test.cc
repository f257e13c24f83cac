// What holds for each command of `tessera`, whichever there are: the table says
// what to try.
#include "tools/commands.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_matchers.h"
#include "base/trace/trace_json.h"
#include "checkpoint/format/sample_checkpoint_test_util.h"
#include "config/reader/json_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/separate_commands.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

using Words = std::vector<std::string>;

constexpr int kRan = 7;  // what commands return that are only parsed

Words Split(const std::string& text) {
  return absl::StrSplit(text, ' ', absl::SkipEmpty());
}

Words Plus(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

class CommandsTest : public ::testing::Test {
 protected:
  CommandsTest()
      : table_(TesseraCommands({[](CommandCall*) { return kRan; },
                                [](CommandCall*) { return kRan; }})) {
    std::string pattern = testing::TempDir() + "/commands_XXXXXX";
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  ~CommandsTest() override { fs::remove_all(folder_); }

  int Run(const Words& args) {
    out_.str("");
    err_.str("");
    return CommandLine("tessera", table_).Run(args, &out_, &err_);
  }
  // Takes the commands' work out of the table: they only return kRan.
  void ParseOnly() {
    for (Command& command : table_) {
      command.run = [](CommandCall*) { return kRan; };
    }
  }
  // Expects that the words are wrong, and says why.
  std::string Wrong(const Words& args) {
    EXPECT_EQ(Run(args), 2) << absl::StrJoin(args, " ");
    EXPECT_EQ(out_.str(), "") << absl::StrJoin(args, " ");
    return err_.str();
  }

  std::string Written(const std::string& name, const std::string& text) {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path) << text;
    return path;
  }
  // Makes one of each thing that commands read: the folders a and b hold
  // checkpoints, run a trace, and the files are configurations.
  void MakeFiles() {
    for (int seed = 0; seed < 2; ++seed) {
      bool committed = false;
      TESSERA_ASSERT_OK(
          SampleCheckpoint(seed).Save(folder_ + (seed == 0 ? "/a" : "/b"),
                                      FileSystem::Real(), 2, &committed));
    }
    TraceRecording recording;
    recording.spans = {
        {TraceTrack::kSteps, "step 1", 0, 1000000, "", -1, "\"step\":1"},
        {TraceTrack::kMain, "forward", 0, 1000000}};
    TESSERA_ASSERT_OK(WriteFileAtomically(folder_ + "/run/trace.rank0.json",
                                          TraceToJson(recording, {0, 1, "h"})));
    Written("good.json", R"({"train_batch_size": 8})");
    Written("bad.json", R"({"train_batch_size": 8, "train_bach_size": 9})");
  }

  std::vector<Command> table_;
  std::string folder_;
  std::ostringstream out_, err_;
};

// How many words a command needs.
size_t Needed(const Command& command) {
  size_t needed = 0;
  for (const std::string& word : Split(command.arguments)) {
    needed += absl::StartsWith(word, "[") ? 0 : 1;
  }
  return needed;
}

TEST_F(CommandsTest, EachHasItsHelpAndIsListed) {
  ASSERT_GE(table_.size(), 19u);
  ASSERT_EQ(Run({"help"}), 0);
  const std::string all = out_.str();
  ASSERT_EQ(Run({"manual"}), 0);
  const std::string manual = out_.str();
  ASSERT_EQ(Run({"completion"}), 0);
  const std::string completion = out_.str();
  std::set<std::string> names;
  for (const Command& command : table_) {
    EXPECT_TRUE(names.insert(command.name).second) << command.name;
    const Words name = Split(command.name);
    EXPECT_THAT(all, HasSubstr(absl::StrCat("\n  ", command.name, " ")));
    EXPECT_THAT(manual, HasSubstr(absl::StrCat(".SS tessera ", command.name)));
    EXPECT_THAT(completion, HasSubstr(absl::StrCat("\"", command.name, "\"")));
    ASSERT_EQ(Run(Plus(name, {"--help"})), 0) << command.name;
    const std::string help = out_.str();
    EXPECT_THAT(help, StartsWith("usage: tessera " + command.name));
    for (const Words& args :
         {Plus(name, {"-h"}), Plus(name, {"help"}), Plus({"help"}, name)}) {
      EXPECT_EQ(Run(args), 0);
      EXPECT_EQ(out_.str(), help) << command.name;
    }
    for (const CommandFlag& flag : command.flags) {
      EXPECT_THAT(help, HasSubstr("\n  " + flag.name)) << command.name;
      EXPECT_THAT(flag.help, Not(IsEmpty())) << command.name << flag.name;
    }
  }
}

TEST_F(CommandsTest, EachSaysWhatIsWrongWithItsWords) {
  ParseOnly();
  for (const Command& command : table_) {
    const Words name = Split(command.name);
    Words typo = name;
    typo.back() += "x";
    EXPECT_THAT(Wrong(typo),
                HasSubstr(absl::StrCat("did you mean '", name.back(), "'?")))
        << command.name;
    const size_t needed = Needed(command);
    const Words enough = Plus(name, Words(needed, "word"));
    EXPECT_EQ(Run(enough), kRan) << command.name;
    if (needed > 0) {
      EXPECT_THAT(Wrong(Plus(name, Words(needed - 1, "word"))),
                  HasSubstr("expected " + command.arguments));
    }
    if (!absl::StrContains(command.arguments, "...")) {
      EXPECT_THAT(Wrong(Plus(enough, {"one", "more"})), HasSubstr("expected "));
    }
    EXPECT_THAT(Wrong(Plus(enough, {"--entirely_else"})),
                AllOf(StartsWith("tessera " + command.name),
                      HasSubstr("unknown flag --entirely_else\n"),
                      HasSubstr("`tessera help " + command.name + "`")));
  }
}

TEST_F(CommandsTest, EachFlagIsParsed) {
  ParseOnly();
  for (const Command& command : table_) {
    const Words enough =
        Plus(Split(command.name), Words(Needed(command), "word"));
    for (const CommandFlag& flag : command.flags) {
      const std::string what = absl::StrCat(command.name, " ", flag.name);
      EXPECT_THAT(Wrong(Plus(enough, {flag.name + "x"})),
                  HasSubstr(absl::StrCat("did you mean '", flag.name, "'?")))
          << what;
      if (flag.value.empty()) {
        EXPECT_EQ(Run(Plus(enough, {flag.name})), kRan) << what;
        EXPECT_THAT(Wrong(Plus(enough, {flag.name + "=1"})),
                    HasSubstr(flag.name + " takes no value"));
      } else {
        EXPECT_EQ(Run(Plus(enough, {flag.name + "=1"})), kRan) << what;
        EXPECT_EQ(Run(Plus(enough, {flag.name, "1"})), kRan) << what;
        EXPECT_THAT(Wrong(Plus(enough, {flag.name})),
                    HasSubstr(flag.name + " needs a value"));
      }
    }
  }
}

TEST_F(CommandsTest, EachExampleIsParsed) {
  ParseOnly();
  for (const Command& command : table_) {
    EXPECT_THAT(command.examples, Not(IsEmpty())) << command.name;
    for (const std::string& example : command.examples) {
      EXPECT_THAT(example, StartsWith(command.name));
      const std::string own = example.substr(0, example.find_first_of("|>"));
      EXPECT_EQ(Run(Split(own)), kRan) << example << "\n" << err_.str();
    }
  }
}

// Returns the sets of keys in braces, as the help of --json names them.
std::vector<std::set<std::string>> DocumentedKeys(const std::string& help) {
  std::vector<std::set<std::string>> keys;
  for (size_t at = 0; (at = help.find('{', at)) != help.npos; ++at) {
    const std::string inside = help.substr(at + 1, help.find('}', at) - at - 1);
    const std::set<std::string> names = absl::StrSplit(inside, ", ");
    keys.push_back(names);
  }
  return keys;
}

std::set<std::string> KeysOf(const JsonValue& object) {
  std::set<std::string> keys;
  for (const JsonMember& member : object.members) keys.insert(member.key);
  return keys;
}

TEST_F(CommandsTest, EachJsonHasTheKeysThatItsHelpNames) {
  MakeFiles();
  const std::string a = folder_ + "/a", b = folder_ + "/b";
  const std::string good = folder_ + "/good.json", bad = folder_ + "/bad.json";
  const std::map<std::string, std::vector<Words>> calls = {
      {"config check", {{good}, {bad}}},
      {"config diff", {{good, good}}},
      {"checkpoint ls", {{folder_}}},
      {"checkpoint show", {{a}}},
      {"checkpoint verify", {{a}}},
      {"checkpoint diff", {{a, b}}},
      {"trace summary", {{folder_ + "/run"}}},
      {"doctor", {{"--dir", folder_}}},
      {"plan", {}},  // plan_command_test.cc
  };
  for (const Command& command : table_) {
    for (const CommandFlag& flag : command.flags) {
      if (flag.name != "--json") continue;
      ASSERT_TRUE(calls.count(command.name))
          << "a call of " << command.name << " --json belongs here";
      const auto documented = DocumentedKeys(flag.help);
      for (const Words& words : calls.at(command.name)) {
        Run(Plus(Plus(Split(command.name), words), {"--json"}));
        const absl::StatusOr<JsonValue> json = ReadJson(out_.str(), "");
        ASSERT_TRUE(json.ok()) << command.name << ": " << json.status()
                               << out_.str() << err_.str();
        if (documented.empty() || words == Words{good}) continue;
        const bool list = json->kind == JsonKind::kArray;
        const std::vector<JsonValue> objects =
            list ? json->elements : std::vector<JsonValue>{*json};
        EXPECT_THAT(objects, Not(IsEmpty())) << command.name;
        for (const JsonValue& object : objects) {
          EXPECT_THAT(documented, Contains(KeysOf(object))) << command.name;
        }
      }
    }
  }
  // A fault's keys are in words.
  EXPECT_EQ(Run({"config", "check", bad, "--json"}), 1);
  const absl::StatusOr<JsonValue> json = ReadJson(out_.str(), "");
  EXPECT_EQ(KeysOf(json->Find("faults")->elements.at(0)),
            (std::set<std::string>{"path", "what", "line", "column"}));
}

TEST_F(CommandsTest, EachHasAnExitStatus) {
  const std::string none = folder_ + "/none", out = folder_ + "/out";
  const std::map<std::string, Words> faults = {
      {"config check", {none}},
      {"config diff", {none, none}},
      {"config explain", {"no_such_key"}},
      {"checkpoint ls", {none}},
      {"checkpoint show", {none}},
      {"checkpoint verify", {none}},
      {"checkpoint diff", {none, none}},
      {"checkpoint rm", {none, "--yes"}},
      {"checkpoint export", {none, out}},
      {"checkpoint import", {none, out}},
      {"checkpoint reshard", {none, out, "--files=1"}},
      {"trace summary", {none}},
      {"trace merge", {none, out}},
      {"report", {none}},
      {"doctor", {"--dir", none}},
  };
  const std::set<std::string> cannot_fail = {"config schema", "config tables",
                                             "completion", "manual", "version"};
  for (const Command& command : table_) {
    const Words name = Split(command.name);
    if (command.name == "plan" || command.name == "tokenize") {
      EXPECT_EQ(Run(name), kRan);  // their own tests have the others
    } else if (cannot_fail.count(command.name)) {
      EXPECT_EQ(Run(name), 0) << command.name;
      EXPECT_NE(out_.str(), "") << command.name;
    } else {
      ASSERT_TRUE(faults.count(command.name))
          << "a call of " << command.name << " that fails belongs here";
      // A diff returns 1 for a difference, so it returns 2 for trouble.
      const int status = absl::EndsWith(command.name, " diff") ? 2 : 1;
      EXPECT_EQ(Run(Plus(name, faults.at(command.name))), status)
          << command.name;
      EXPECT_THAT(out_.str() + err_.str(), Not(IsEmpty())) << command.name;
    }
  }
}

TEST(SeparateProgramsTest, AreBesideTheCommandOrApart) {
  std::string folder = testing::TempDir() + "/separate_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string bin = folder + "/bin",
                    apart = folder + "/libexec/tessera/bin";
  fs::create_directories(bin);
  fs::create_directories(apart);
  EXPECT_EQ(FindProgram(bin, "it"), "");
  EXPECT_THAT(NoProgram(bin, "it"), HasSubstr("bazel build //tools:it"));
  const auto make = [](const std::string& path) {
    std::ofstream(path) << "#!/bin/sh\n";
    fs::permissions(path, fs::perms::owner_all);
  };
  std::ofstream(apart + "/it") << "no program";
  EXPECT_EQ(FindProgram(bin, "it"), "");
  make(apart + "/it");
  EXPECT_EQ(fs::canonical(FindProgram(bin, "it")),
            fs::canonical(apart + "/it"));
  make(bin + "/it");
  EXPECT_EQ(FindProgram(bin, "it"), bin + "/it");
}

}  // namespace
}  // namespace tessera
