#include "examples/gpt/flags.h"

#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

using ::tessera::IsOk;
using ::tessera::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

absl::StatusOr<TrainFlags> Parse(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "train");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  return ParseTrainFlags(static_cast<int>(argv.size()), argv.data());
}

TEST(FlagsTest, ReadsBothSpellingsAndSwitches) {
  const auto flags = Parse({"--data=a=b", "--steps", "7", "--stage=2", "--json",
                            "--dim", "64", "--heads=4", "--prompt="});
  ASSERT_THAT(flags.status(), IsOk());
  EXPECT_EQ(flags->data, "a=b");
  EXPECT_EQ(flags->steps, 7);
  EXPECT_EQ(flags->stage, 2);
  EXPECT_EQ(flags->model.dim(), 64);
  EXPECT_EQ(flags->prompt, "");
  EXPECT_TRUE(flags->json);
  EXPECT_FALSE(flags->quiet);
}

TEST(FlagsTest, NamesWhatIsWrong) {
  const auto refuses = [](std::vector<std::string> arguments,
                          const std::string& words) {
    EXPECT_THAT(Parse(arguments).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(words)));
  };
  refuses({"--stepz", "7"}, "unknown flag '--stepz'");
  refuses({"seven"}, "unknown flag 'seven'");
  refuses({"--steps"}, "--steps: no value");
  refuses({"--steps", "x"}, "--steps: expected a whole number from 0, got 'x'");
  refuses({"--steps=-1"}, "got '-1'");
  refuses({"--dtype=int8"}, "--dtype: expected fp32, bf16 or fp16, got 'int8'");
  refuses({"--stage=4"}, "--stage: expected a whole number, 0 to 3, got '4'");
  refuses({"--temperature=nan"}, "--temperature: expected a number");
  refuses({"--data=x", "--dim=7"}, "--dim 7 is not a multiple of --heads 6");
  refuses({}, "--data FILE is missing");
  refuses({"--data="}, "--data: expected a name, got ''");
  refuses({"--json=yes"}, "unknown flag '--json=yes'");
}

TEST(FlagsTest, HelpAndSamplingNeedNoData) {
  EXPECT_TRUE(Parse({"--help"})->help);
  EXPECT_THAT(Parse({"--resume=x", "--steps=0", "--sample=9"}).status(),
              IsOk());
}

}  // namespace
