#include "examples/gpt/flags.h"

#include <string>
#include <vector>

#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

using ::tessera::IsOk;
using ::tessera::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

absl::StatusOr<TrainFlags> Parse(std::vector<std::string> arguments) {
  const absl::FlagSaver defaults;
  arguments.insert(arguments.begin(), "train");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  absl::ParseCommandLine(static_cast<int>(argv.size()), argv.data());
  return ReadTrainFlags();
}

TEST(FlagsTest, ReadsBothSpellingsAndSwitches) {
  const auto flags = Parse({"--data=a=b", "--steps", "7", "--stage=2", "--json",
                            "--dim", "64", "--heads=4", "--prompt=", "--seed=5",
                            "--ignore_unknown", "--chunked_loss"});
  ASSERT_THAT(flags.status(), IsOk());
  EXPECT_EQ(flags->data, "a=b");
  EXPECT_EQ(flags->steps, 7);
  EXPECT_EQ(flags->stage, 2);
  EXPECT_EQ(flags->model.dim(), 64);
  EXPECT_EQ(flags->prompt, "");
  EXPECT_EQ(flags->sample.seed, 5);
  EXPECT_TRUE(flags->json);
  EXPECT_TRUE(flags->ignore_unknown);
  EXPECT_TRUE(flags->chunked_loss);
  EXPECT_FALSE(flags->quiet);
}

TEST(FlagsTest, DefaultsAreThoseOfTheStructs) {
  const auto flags = Parse({"--data=x"});
  ASSERT_THAT(flags.status(), IsOk());
  EXPECT_EQ(flags->stage, -1);
  EXPECT_EQ(flags->steps, 100);
  EXPECT_EQ(flags->model.dim(), 384);
  EXPECT_EQ(flags->sample.count, 0);
  EXPECT_EQ(flags->sample.temperature, 0.8);
}

TEST(FlagsTest, NamesWhatIsWrong) {
  const auto refuses = [](std::vector<std::string> arguments,
                          const std::string& words) {
    EXPECT_THAT(Parse(arguments).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(words)));
  };
  refuses({"--steps=-1"},
          "--steps: expected a whole number, 0 to 2147483647, got -1");
  refuses({"--layers=0"}, "--layers: expected a whole number, 1 to");
  refuses({"--dtype=int8"}, "--dtype: expected fp32, bf16 or fp16, got int8");
  refuses({"--stage=4"}, "--stage: expected 0 to 3, or -1");
  refuses({"--temperature=nan"}, "--temperature: expected 0 to 100, got nan");
  refuses({"--dropout=1"}, "--dropout: expected 0 to 0.99, got 1");
  refuses({"--data=x", "--dim=7"},
          "--dim: expected a multiple of --heads 6, got 7");
  refuses({}, "--data FILE is missing");
  refuses({"--data="}, "--data FILE is missing");
}

TEST(FlagsTest, SetKeysOfTheConfiguration) {
  const auto keys = [](std::vector<std::string> arguments) {
    arguments.push_back("--data=x");
    return ConfigKeys(*Parse(arguments));
  };
  EXPECT_THAT(keys({}), IsEmpty());
  EXPECT_THAT(keys({"--stage=0"}), ElementsAre("zero_optimization.stage=0"));
  EXPECT_THAT(keys({"--dtype=bf16"}),
              ElementsAre("bf16.enabled=true", "fp16.enabled=false"));
  EXPECT_THAT(keys({"--dtype=fp32"}),
              ElementsAre("bf16.enabled=false", "fp16.enabled=false"));
}

TEST(FlagsTest, SamplingNeedsNoData) {
  EXPECT_THAT(Parse({"--resume=x", "--steps=0", "--sample=9"}).status(),
              IsOk());
}

}  // namespace
