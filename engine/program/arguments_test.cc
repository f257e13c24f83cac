#include "engine/program/arguments.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "base/status_matchers.h"
#include "engine/program/help_text.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

ABSL_FLAG(int64_t, steps, 100, "Optimizer steps.");
ABSL_FLAG(double, alpha, 0.5, "Weight.");
ABSL_FLAG(bool, augment, true, "Random crops.");
ABSL_FLAG(
    std::string, data, "",
    "Files of tokens, by a pattern, with a text that does not fit into one "
    "line of a terminal.");

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Optional;
using ::testing::StrEq;

class ArgumentsTest : public testing::Test {
 protected:
  absl::StatusOr<Arguments> Read(std::vector<std::string> arguments) {
    words_ = std::move(arguments);
    words_.insert(words_.begin(), "/bin/program");
    std::vector<char*> argv;
    for (std::string& word : words_) argv.push_back(word.data());
    argv.push_back(nullptr);
    return ReadArguments(static_cast<int>(words_.size()), argv.data(), options_,
                         __FILE__);
  }
  // The message of an error.
  std::string Said(std::vector<std::string> arguments) {
    const absl::Status status = Read(std::move(arguments)).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return std::string(status.message());
  }

  const absl::FlagSaver defaults_;
  StartOptions options_;
  std::vector<std::string> words_;
};

TEST_F(ArgumentsTest, ReadsAllKinds) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const Arguments found,
      Read({"--world=4", "--steps", "7", "--config", "a.json", "-data=x=y",
            "--set", "a.b=1", "--noaugment", "--set=c=[2, 3]", "--plan_world",
            "8", "--alpha=-1"}));
  EXPECT_EQ(found.world, 4);
  EXPECT_EQ(found.plan_world, 8);
  EXPECT_THAT(found.config, Optional(std::string("a.json")));
  EXPECT_THAT(found.set, ElementsAre("a.b=1", "c=[2, 3]"));
  EXPECT_EQ(found.help, "");
  EXPECT_EQ(absl::GetFlag(FLAGS_steps), 7);
  EXPECT_EQ(absl::GetFlag(FLAGS_alpha), -1);
  EXPECT_EQ(absl::GetFlag(FLAGS_data), "x=y");
  EXPECT_FALSE(absl::GetFlag(FLAGS_augment));
}

TEST_F(ArgumentsTest, SwitchesMayHaveAValue) {
  TESSERA_EXPECT_OK(Read({"--augment=false"}).status());
  EXPECT_FALSE(absl::GetFlag(FLAGS_augment));
  TESSERA_EXPECT_OK(Read({"--augment"}).status());
  EXPECT_TRUE(absl::GetFlag(FLAGS_augment));
}

TEST_F(ArgumentsTest, UnknownFlagsAreRefusedWithTheNearest) {
  EXPECT_EQ(
      Said({"--dta=x"}),
      "unknown flag --dta (did you mean --data?); --help lists the flags");
  EXPECT_THAT(Said({"--wrld=2"}), HasSubstr("(did you mean --world?)"));
  EXPECT_THAT(Said({"-world=2"}), HasSubstr("-world (did you mean --world?)"));
  EXPECT_THAT(Said({"--cofig", "x"}), HasSubstr("(did you mean --config?)"));
  EXPECT_THAT(Said({"--nosteps"}), HasSubstr("unknown flag --nosteps"));
  EXPECT_EQ(Said({"--zzzzzz"}),
            "unknown flag --zzzzzz; --help lists the flags");
  EXPECT_EQ(absl::GetFlag(FLAGS_data), "");
}

TEST_F(ArgumentsTest, ValuesThatDoNotFitAreRefused) {
  EXPECT_EQ(Said({"--steps=x"}), "--steps: expected a whole number, got 'x'");
  EXPECT_EQ(Said({"--alpha=x"}), "--alpha: expected a number, got 'x'");
  EXPECT_EQ(Said({"--augment=x"}),
            "--augment: expected true or false, got 'x'");
  EXPECT_EQ(Said({"--steps"}), "--steps: expected a value");
  EXPECT_EQ(Said({"--steps", "--data=x"}), "--steps: expected a value");
  EXPECT_EQ(Said({"--config="}), "--config: expected a file, got ''");
  EXPECT_EQ(Said({"--set", "stage"}),
            "--set: expected KEY=VALUE, as zero_optimization.stage=1, got "
            "'stage'");
  EXPECT_THAT(Said({"--world=0"}), HasSubstr("--world: expected an integer"));
}

TEST_F(ArgumentsTest, WordsAreRefusedOrStay) {
  EXPECT_EQ(Said({"x"}), "unexpected argument 'x'; --help lists the flags");
  EXPECT_THAT(Said({"a/b.json"}),
              HasSubstr("(did you mean --config=a/b.json?)"));
  options_.positional = true;
  TESSERA_ASSERT_OK_AND_ASSIGN(const Arguments found,
                               Read({"x", "--steps=3", "--", "--steps=4"}));
  EXPECT_THAT(found.positional, ElementsAre(StrEq("x"), StrEq("--steps=4")));
  EXPECT_EQ(absl::GetFlag(FLAGS_steps), 3);
}

TEST_F(ArgumentsTest, AProgramWithoutAConfigurationHasNoFlagForIt) {
  options_.reads_config = false;
  EXPECT_THAT(Said({"--config=a.json"}), HasSubstr("unknown flag --config"));
  TESSERA_ASSERT_OK_AND_ASSIGN(const Arguments found, Read({"--help"}));
  EXPECT_THAT(found.help, Not(HasSubstr("--config")));
}

TEST_F(ArgumentsTest, HelpListsTheFlagsOfTheProgramAndOfInit) {
  options_.about = "trains a model";
  options_.config = "zero3.json";
  TESSERA_ASSERT_OK_AND_ASSIGN(const Arguments found,
                               Read({"--nonsense", "--help"}));
  EXPECT_THAT(
      found.help,
      HasSubstr(
          "program trains a model.\n\n"
          "Usage: program [--world=N] [--config=FILE] [--set KEY=VALUE]... "
          "[flags]\n\n"
          "Flags of this program:\n"
          "  --alpha               Weight. Default: 0.5.\n"
          "  --noaugment           Random crops. On by default.\n"
          "  --data                Files of tokens, by a pattern, with a text "
          "that does\n"
          "                        not fit into one line of a terminal.\n"
          "  --steps               Optimizer steps. Default: 100.\n"
          "  --width               Width of the model. Default: 8.\n\n"
          "Configuration:\n"
          "  --config=FILE         Configuration, DeepSpeed-style JSON. "
          "Default:\n"
          "                        zero3.json, in the current folder or beside "
          "the\n"
          "                        program.\n"));
  for (const InitFlag& flag : InitFlags()) {
    EXPECT_THAT(found.help, HasSubstr("\n  --" + flag.name + "="));
  }
  EXPECT_THAT(found.help,
              HasSubstr("program --world=2 --set zero_optimization.stage=1\n"));
  // Flags of libraries, gtest's program among them, are those of other folders.
  EXPECT_THAT(FlagsOf("/elsewhere/main.cc"), IsEmpty());
  EXPECT_THAT(found.help, Not(HasSubstr("flagfile")));
  TESSERA_EXPECT_OK(Read({"-h"}).status());
}

TEST_F(ArgumentsTest, NamesOfFlagsAreNotThoseOfInit) {
  TESSERA_EXPECT_OK(CheckFlagNames(InitFlags()));
  EXPECT_THAT(CheckFlagNames({{"rank", "N", ""}, {"steps", "N", ""}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("the flag --steps of")));
}

// What stands behind "--" is the program's.
TEST_F(ArgumentsTest, HelpMayBeAWord) {
  options_.positional = true;
  TESSERA_ASSERT_OK_AND_ASSIGN(const Arguments found, Read({"--", "--help"}));
  EXPECT_EQ(found.help, "");
}

TEST(ProgramNameTest, HasNoFolder) {
  std::string path = "a/b", bare = "b";
  char* argv[] = {path.data(), bare.data()};
  EXPECT_EQ(ProgramName(1, argv), "b");
  EXPECT_EQ(ProgramName(1, argv + 1), "b");
  EXPECT_EQ(ProgramName(0, argv), "program");
}

}  // namespace
}  // namespace tessera
