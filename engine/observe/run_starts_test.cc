#include "engine/observe/run_starts.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "config/reader/json_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::SizeIs;

std::string RunText(const std::string& starts) {
  return absl::StrCat("{\"version\": \"1\",\n \"starts\": ", starts,
                      ",\n \"config\": {}}\n");
}

TEST(RunStartsTest, AResumedRunKeepsItsStarts) {
  const RunStart first = {100.25, 2, 3}, second = {200, 3, 1};
  std::string text = RunText(StartsJson("", first));
  text = WithEnd(text, first, {"failed", 150.5, 17});
  text = RunText(StartsJson(text, second));
  text = WithEnd(text, second, {"closed", 250, 30});
  const auto run = ReadJson(text, "run.json");
  ASSERT_TRUE(run.ok()) << run.status();
  const auto& starts = run->Find("starts")->elements;
  ASSERT_THAT(starts, SizeIs(2));
  EXPECT_EQ(starts[0].Find("time")->number, 100.25);
  EXPECT_EQ(starts[0].Find("world_size")->number, 2);
  EXPECT_EQ(starts[0].Find("stage")->number, 3);
  EXPECT_EQ(starts[0].Find("end")->text, "failed");
  EXPECT_EQ(starts[0].Find("end_time")->number, 150.5);
  EXPECT_EQ(starts[0].Find("step")->number, 17);
  EXPECT_EQ(starts[1].Find("end")->text, "closed");
}

// Two engines of one program may have one folder: each finds its own start.
TEST(RunStartsTest, AnEndIsThatOfItsStart) {
  const RunStart first = {100, 2, 3}, second = {200, 3, 1}, other = {300, 1, 0};
  const std::string text =
      RunText(StartsJson(RunText(StartsJson("", first)), second));
  EXPECT_THAT(WithEnd(text, first, {"ended", 400, 5}),
              HasSubstr("\"stage\": 3, \"end\": \"ended\""));
  EXPECT_THAT(WithEnd(text, second, {"ended", 400, 5}),
              HasSubstr("\"stage\": 1, \"end\": \"ended\""));
  EXPECT_EQ(WithEnd(text, other, {"ended", 400, 5}), "");
}

TEST(RunStartsTest, WhatIsNoRunHasNoStarts) {
  const RunStart start = {100, 2, 3};
  const std::string alone = StartsJson("", start);
  EXPECT_EQ(alone, "[{\"time\": 100.000000, \"world_size\": 2, \"stage\": 3}]");
  EXPECT_EQ(StartsJson("{\"starts\": [", start), alone);
  EXPECT_EQ(StartsJson("[]", start), alone);
  // An older version's file tells of the last process only.
  EXPECT_EQ(StartsJson("{\"start_time\": 5.5, \"world_size\": 4, \"stage\": 0}",
                       start),
            "[{\"time\": 5.5, \"world_size\": 4, \"stage\": 0},\n  " +
                alone.substr(1));
}

TEST(RunStartsTest, ManyStartsAreThoseAtTheEnd) {
  std::string many;
  for (int k = 0; k < 1000; ++k) {
    absl::StrAppend(&many, k == 0 ? "[" : ",", "{\"time\": ", k, "}");
  }
  const std::string text =
      RunText(StartsJson(RunText(absl::StrCat(many, "]")), {2001, 1, 0}));
  const auto run = ReadJson(text, "run.json");
  ASSERT_TRUE(run.ok()) << run.status();
  const auto& starts = run->Find("starts")->elements;
  ASSERT_THAT(starts, SizeIs(1000));
  EXPECT_EQ(starts.front().Find("time")->number, 1);
  EXPECT_EQ(starts.back().Find("time")->number, 2001);
}

TEST(RunStartsTest, TheCommandIsForPeople) {
  EXPECT_EQ(CommandText(std::string("bin/train\0--world=2\0--x=a b\0", 28)),
            "bin/train --world=2 '--x=a b'");
  EXPECT_EQ(CommandText("\xFF"), "'?'");
  EXPECT_EQ(CommandText(""), "");
  const std::string longer = CommandText(std::string(10000, 'a'));
  EXPECT_THAT(longer, SizeIs(4100));
  EXPECT_THAT(longer, EndsWith("a ..."));
}

std::string Command(std::vector<std::string> words) {
  std::string cmdline;
  for (const std::string& word : words) cmdline += word + '\0';
  return CommandText(cmdline);
}

TEST(RunStartsTest, TheCommandKeepsSecrets) {
  EXPECT_EQ(Command({"train", "--api_key=abc", "--width=8"}),
            "train '--api_key=***' --width=8");
  EXPECT_EQ(Command({"train", "--hf-token", "abc", "data"}),
            "train --hf-token '***' data");
  EXPECT_EQ(Command({"train", "-password", "-abc", "--secret=a=b"}),
            "train -password '***' '--secret=***'");
  EXPECT_EQ(Command({"train", "--set", "comet.api_key=abc",
                     "--set=comet.apiKey=abc", "--CLIENT_SECRET=abc"}),
            "train --set 'comet.api_key=***' '--set=comet.apiKey=***' "
            "'--CLIENT_SECRET=***'");
  // A flag without a value is not one before a value.
  EXPECT_EQ(Command({"train", "--token", "--width=8", "abc"}),
            "train --token --width=8 abc");
}

TEST(RunStartsTest, TheCommandShowsWhatIsNoSecret) {
  for (const std::string word :
       {"--max_tokens=2048", "--tokenizer=t.json", "--key_file=k",
        "--num_key_value_heads=8", "--keep_last=3", "monkey"}) {
    EXPECT_EQ(Command({"train", word, "abc"}),
              absl::StrCat("train ", word, " abc"));
  }
}

}  // namespace
}  // namespace tessera
