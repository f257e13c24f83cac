#include "base/command/command_line.h"

#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/command/command_terminal.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class CommandLineTest : public ::testing::Test {
 protected:
  CommandLineTest()
      : tool_("tool",
              {{"box open",
                "FILE",
                "Opens a box.",
                "It stays open.",
                {{"--wide", "", "Widely."}, {"--size", "N", "Of the box (1)."}},
                {"box open b.box --size 3"},
                [this](CommandCall* call) { return Called(call); }},
               {"box close",
                "A B...",
                "Closes boxes.",
                "",
                {},
                {},
                [this](CommandCall* call) { return Called(call); }},
               {"rest",
                "[HOURS]",
                "Does nothing.",
                "",
                {},
                {},
                [this](CommandCall* call) { return Called(call); }}}) {}

  int Called(CommandCall* call) {
    words_ = call->words();
    wide_ = call->Has("--wide");
    size_ = 1;
    green_ = call->InColor(CommandCall::Color::kGreen, "good");
    progress_ = call->progress() != nullptr;
    sure_ = call->Confirm("Sure?");
    return call->ReadNumber("--size", 1, &size_) ? 7 : 2;
  }
  int Run(const std::vector<std::string>& args) {
    out_.str("");
    err_.str("");
    return tool_.Run(args, &out_, &err_, terminal_);
  }
  // Expects that the words are wrong, and says why.
  std::string Wrong(const std::vector<std::string>& args) {
    EXPECT_EQ(Run(args), 2);
    EXPECT_EQ(out_.str(), "");
    return err_.str();
  }

  const CommandLine tool_;
  std::ostringstream out_, err_;
  std::vector<std::string> words_;
  bool wide_ = false;
  int64_t size_ = 1;
  // What a command has of the terminal.
  CommandTerminal terminal_;
  std::string green_;
  bool progress_ = false;
  std::optional<bool> sure_;
};

TEST_F(CommandLineTest, FlagsStandAnywhereAndTakeValuesInBothWays) {
  for (const std::vector<std::string>& args :
       std::vector<std::vector<std::string>>{
           {"box", "open", "--size=3", "--wide", "b"},
           {"box", "open", "b", "--wide", "--size", "3"},
           {"box", "open", "--size", "9", "b", "--size=3", "--wide"}}) {
    EXPECT_EQ(Run(args), 7) << err_.str();
    EXPECT_THAT(words_, ElementsAre("b"));
    EXPECT_TRUE(wide_);
    EXPECT_EQ(size_, 3);
  }
  EXPECT_EQ(Run({"box", "open", "--", "--wide"}), 7);
  EXPECT_THAT(words_, ElementsAre("--wide"));
  EXPECT_FALSE(wide_);
  EXPECT_EQ(Run({"rest", "-"}), 7);
  EXPECT_THAT(words_, ElementsAre("-"));
}

TEST_F(CommandLineTest, CountsWords) {
  EXPECT_EQ(Run({"rest"}), 7);
  EXPECT_EQ(Run({"box", "close", "a", "b", "c"}), 7);
  EXPECT_THAT(Wrong({"rest", "1", "2"}),
              HasSubstr("expected [HOURS], got '1 2'"));
  EXPECT_THAT(Wrong({"box", "close", "a"}),
              HasSubstr("expected A B..., got 'a': B... is missing\n"));
  EXPECT_THAT(Wrong({"box", "open"}),
              AllOf(HasSubstr("tool box open: expected FILE, got nothing"),
                    HasSubstr("`tool help box open`")));
}

TEST_F(CommandLineTest, SaysWhatMayHaveBeenMeant) {
  EXPECT_THAT(Wrong({"rset"}),
              AllOf(HasSubstr("unknown command 'rset', did you mean 'rest'?"),
                    HasSubstr("`tool help`")));
  EXPECT_THAT(Wrong({"box", "opne"}),
              AllOf(HasSubstr("'opne', did you mean 'open'?"),
                    HasSubstr("open, close")));
  EXPECT_THAT(Wrong({"box"}), HasSubstr("expected a command; there are open"));
  EXPECT_THAT(Wrong({"box", "open", "b", "--wied"}),
              HasSubstr("unknown flag --wied, did you mean '--wide'?"));
  EXPECT_THAT(Wrong({"box", "open", "b", "--entirely=3"}),
              AllOf(HasSubstr("unknown flag --entirely\n"),
                    Not(HasSubstr("did you mean"))));
  EXPECT_THAT(Wrong({"help", "bix"}), HasSubstr("did you mean 'box'?"));
}

TEST_F(CommandLineTest, ValuesAreLookedAt) {
  EXPECT_THAT(Wrong({"box", "open", "b", "--size"}),
              HasSubstr("--size needs a value, N"));
  EXPECT_THAT(Wrong({"box", "open", "b", "--wide=1"}),
              HasSubstr("--wide takes no value"));
  for (const char* size : {"0", "x", "", "3x"}) {
    EXPECT_THAT(Wrong({"box", "open", "b", "--size", size}),
                HasSubstr(absl::StrCat(
                    "--size: expected a number from 1 on, got '", size, "'")));
  }
}

TEST_F(CommandLineTest, ColorsProgressAndQuestionsAreForTerminals) {
  EXPECT_EQ(Run({"rest"}), 7);
  EXPECT_EQ(green_, "good");
  EXPECT_FALSE(progress_);
  EXPECT_FALSE(sure_.has_value());
  EXPECT_EQ(err_.str(), "");
  EXPECT_THAT(Wrong({"rest", "1", "2"}), StartsWith("tool rest: "));
  std::string answer = "y";
  terminal_ = {true, true, true, [&](std::string* line) {
                 *line = answer;
                 return answer != "end";
               }};
  EXPECT_EQ(Run({"rest"}), 7);
  EXPECT_EQ(green_, "\x1b[32mgood\x1b[0m");
  EXPECT_TRUE(progress_);
  EXPECT_EQ(sure_, true);
  EXPECT_EQ(err_.str(), "Sure? [y/N] ");
  for (const char* no : {"", "n", "maybe", "end"}) {
    answer = no;
    EXPECT_EQ(Run({"rest"}), 7);
    EXPECT_EQ(sure_, false) << no;
  }
  EXPECT_THAT(Wrong({"rest", "1", "2"}),
              StartsWith("\x1b[31mtool rest\x1b[0m: "));
}

TEST_F(CommandLineTest, HelpIsNoError) {
  for (const std::vector<std::string>& args :
       std::vector<std::vector<std::string>>{
           {"help"}, {"--help"}, {"-h"}, {"help", "box"}, {"box", "--help"}}) {
    EXPECT_EQ(Run(args), 0);
    EXPECT_EQ(err_.str(), "");
    EXPECT_THAT(out_.str(), AllOf(HasSubstr("  box open              "
                                            "Opens a box.\n"),
                                  HasSubstr("box close")));
    EXPECT_EQ(absl::StrContains(out_.str(), "  rest "), args.size() == 1)
        << out_.str();
  }
  for (const std::vector<std::string>& args :
       std::vector<std::vector<std::string>>{{"help", "box", "open"},
                                             {"box", "open", "--help"},
                                             {"box", "open", "b", "-h"}}) {
    EXPECT_EQ(Run(args), 0);
    EXPECT_EQ(out_.str(),
              "usage: tool box open FILE [--wide] [--size N]\n"
              "\n"
              "Opens a box.\n"
              "It stays open.\n"
              "\n"
              "  --wide                Widely.\n"
              "  --size N              Of the box (1).\n"
              "\n"
              "examples:\n"
              "  tool box open b.box --size 3\n");
  }
  EXPECT_EQ(Run({}), 2);
  EXPECT_THAT(err_.str(), HasSubstr("usage: tool COMMAND ..."));
}

TEST_F(CommandLineTest, LinesAreBrokenForATerminal) {
  const std::string words(300, 'w');
  std::string text;
  for (int i = 0; i < 40; ++i) absl::StrAppend(&text, "word ");
  const CommandLine tool("tool",
                         {{"a", "", text, "", {{"--f", "N", text}}, {}, {}}});
  for (const absl::string_view line :
       absl::StrSplit(absl::StrCat(tool.Help(), tool.Help("a")), '\n')) {
    EXPECT_LE(line.size(), 79u) << line;
  }
}

TEST_F(CommandLineTest, TheManualHasAllOfIt) {
  const std::string page = tool_.ManualPage("-x does\n.y");
  EXPECT_THAT(page, AllOf(HasSubstr(".SY \"tool box open\"\n.I FILE\n"
                                    ".OP \\-\\-wide \n"),
                          HasSubstr(".TP\n.B \\-\\-size N\nOf the box (1).\n"),
                          HasSubstr("\ntool box open b.box \\-\\-size 3\n"),
                          HasSubstr(".SH DESCRIPTION\n\\-x does\n")));
}

// By the shell that is to use it.
TEST_F(CommandLineTest, BashCompletes) {
  const auto completed = [&](const std::string& words, int at) {
    const std::string script = absl::StrCat(
        tool_.Completion(), "COMP_WORDS=(", words, "); COMP_CWORD=", at,
        "; cd /proc/self/fdinfo && _tool; echo -n \"${COMPREPLY[*]}\"");
    const std::string path = testing::TempDir() + "/completion.sh";
    FILE* const file = fopen(path.c_str(), "w");
    fputs(script.c_str(), file);
    fclose(file);
    FILE* const pipe = popen(absl::StrCat("bash ", path).c_str(), "r");
    char text[256] = "";
    const size_t bytes = fread(text, 1, sizeof(text) - 1, pipe);
    EXPECT_EQ(pclose(pipe), 0);
    return std::string(text, bytes);
  };
  EXPECT_EQ(completed("tool ''", 1), "box help rest");
  EXPECT_EQ(completed("tool b", 1), "box");
  EXPECT_EQ(completed("tool box o", 2), "open");
  EXPECT_EQ(completed("tool box open --s", 3), "--size");
  EXPECT_EQ(completed("tool box open x --w", 4), "--wide");
}

}  // namespace
}  // namespace tessera
