#include "report/run_story.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "report/report_page.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

// Each of `steps` took a second, the first of them at `time`.
std::string Lines(double time, int first, int last) {
  std::string lines;
  for (int step = first; step <= last; ++step) {
    absl::StrAppend(&lines, "{\"step\": ", step,
                    ", \"loss\": 1, \"time\": ", time + (step - first),
                    ", \"step_ms\": ", 10 * step,
                    ", \"memory_peak_bytes\": 1048576}\n");
  }
  return lines;
}

RunFiles RunOf(const std::string& lines, const std::string& run_json) {
  RunFiles run;
  run.folder = "a/folder";
  ReadMetrics(lines, "m", &run);
  auto json = ReadJson(run_json, "run.json");
  TESSERA_EXPECT_OK(json.status());
  if (json.ok()) run.run = *std::move(json);
  return run;
}

constexpr char kTwoStarts[] =
    R"({"starts": [{"time": 100, "world_size": 2, "end": "failed",
                    "end_time": 111},
                   {"time": 200, "world_size": 3, "end": "closed",
                    "end_time": 215}]})";

TEST(RunStoryTest, AResumeOnOtherRanks) {
  // No step was made twice: only the times tell.
  const RunStory story = StoryOf(
      RunOf(absl::StrCat(Lines(101, 1, 10), Lines(203, 11, 20)), kTwoStarts));
  ASSERT_THAT(story.resumes, SizeIs(1));
  EXPECT_EQ(story.resumes[0].step, 10);
  EXPECT_TRUE(story.resumes[0].other_ranks);
  EXPECT_EQ(story.resumes[0].Title(), "resumed at step 10 on 3 ranks");
  EXPECT_EQ(story.seconds, 11 + 15);
  EXPECT_EQ(story.state, "finished");
  EXPECT_EQ(story.last_process, 10u);
}

TEST(RunStoryTest, StepsThatWereMadeAgain) {
  // The process that ended at step 9 had written its checkpoint at step 6.
  const RunStory story = StoryOf(
      RunOf(absl::StrCat(Lines(101, 1, 9), Lines(203, 7, 20)), kTwoStarts));
  ASSERT_THAT(story.resumes, SizeIs(1));
  EXPECT_EQ(story.resumes[0].step, 6);
  EXPECT_EQ(story.last_process, 6u);
  // A third process began before that one: the second one's steps are gone.
  const RunStory back = StoryOf(
      RunOf(absl::StrCat(Lines(101, 1, 9), Lines(203, 7, 9), Lines(300, 3, 9)),
            kTwoStarts));
  ASSERT_THAT(back.resumes, SizeIs(1));
  EXPECT_EQ(back.resumes[0].step, 2);
  EXPECT_EQ(back.resumes[0].ranks, 0);
}

TEST(RunStoryTest, ARunThatBeganAnewWasNotResumed) {
  const RunStory story = StoryOf(
      RunOf(absl::StrCat(Lines(101, 1, 9), Lines(203, 1, 5)), kTwoStarts));
  EXPECT_THAT(story.resumes, IsEmpty());
  EXPECT_EQ(story.started, 200);
  EXPECT_EQ(story.seconds, 15);
}

TEST(RunStoryTest, TheHeadlineIsOfTheNewestRun) {
  // Resumed at step 10, then a shorter run in the same folder.
  const RunFiles run = RunOf(
      absl::StrCat(Lines(81, 1, 10), Lines(103, 11, 15), Lines(203, 1, 4)),
      kTwoStarts);
  const std::string page = ReportPage(run);
  EXPECT_THAT(page, HasSubstr("finished</span>step 4 after 15 s</p>"));
  EXPECT_THAT(page, HasSubstr("<b>4</b><span>last step</span>"));
  EXPECT_THAT(page, HasSubstr("m: 11 lines of an earlier run in this folder "
                              "are left out (steps 5 to 15)"));
  EXPECT_EQ(StoryOf(run).last_process, 0u);
}

TEST(RunStoryTest, AStartWithoutStepsIsTold) {
  const RunFiles run = RunOf(Lines(101, 1, 9), kTwoStarts);
  EXPECT_TRUE(StoryOf(run).last_start_has_no_step);
  EXPECT_THAT(ReportPage(run),
              HasSubstr("; the last start has made no step</p>"));
}

// The first process's last step was made when the second one started.
TEST(RunStoryTest, AStepAtTheTimeOfAStart) {
  const RunStory story = StoryOf(
      RunOf(absl::StrCat(Lines(191, 1, 10), Lines(203, 7, 12)), kTwoStarts));
  ASSERT_THAT(story.resumes, SizeIs(1));
  EXPECT_EQ(story.resumes[0].Title(), "resumed at step 6 on 3 ranks");
}

// A skipped step has the number of the step before it.
TEST(RunStoryTest, ASkippedStepIsNoResume) {
  EXPECT_THAT(StoryOf(RunOf("{\"step\": 1}\n{\"step\": 1, \"skipped\": 1}\n"
                            "{\"step\": 2}\n",
                            "{}"))
                  .resumes,
              IsEmpty());
}

TEST(RunStoryTest, HowItEnded) {
  const auto state = [](const std::string& end) {
    return StoryOf(
               RunOf(Lines(101, 1, 2),
                     absl::StrCat(R"({"starts": [{"time": 100)", end, "}]}")))
        .state;
  };
  EXPECT_EQ(state(R"(, "end": "closed")"), "finished");
  EXPECT_EQ(state(R"(, "end": "ended")"), "ended");
  EXPECT_EQ(state(R"(, "end": "failed")"), "failed");
  EXPECT_EQ(state(""), "still running, or killed");
  // An older run.json says nothing about it.
  EXPECT_EQ(StoryOf(RunOf(Lines(101, 1, 2), R"({"start_time": 100})")).state,
            "");
}

TEST(RunStoryTest, AnOlderRunFile) {
  const RunStory story =
      StoryOf(RunOf(absl::StrCat(Lines(101, 1, 9), Lines(203, 10, 12)),
                    R"({"start_time": 200, "world_size": 3})"));
  ASSERT_THAT(story.resumes, SizeIs(1));
  EXPECT_EQ(story.resumes[0].Title(), "resumed at step 9 on 3 ranks");
  EXPECT_FALSE(story.resumes[0].other_ranks);  // nobody knows
  EXPECT_EQ(story.seconds, 8 + 5);
}

TEST(RunStoryTest, NothingIsKnown) {
  const RunStory story = StoryOf(RunFiles());
  EXPECT_THAT(story.resumes, IsEmpty());
  EXPECT_TRUE(std::isnan(story.seconds));
  EXPECT_EQ(story.state, "");
}

TEST(ReportPageTest, TheHeadlineSaysWhatItWas) {
  RunFiles run = RunOf(absl::StrCat(Lines(101, 1, 10), Lines(203, 11, 20)),
                       absl::StrCat(R"({"model": "my::Net<int>", "version": "1",
            "world_size": 3, "hosts": ["a", "a", "b"], "device": "cpu",
            "parameters": 1234567, "command": "train --steps=20",)",
                                    std::string(kTwoStarts).substr(1)));
  run.memory_pages = {{"memory0.html", "rank 0"}};
  const std::string page = ReportPage(run);
  EXPECT_THAT(page, HasSubstr("<h1>my::Net&lt;int&gt;</h1>"));
  EXPECT_THAT(page,
              HasSubstr("<span class=\"state\">finished</span>step 20 "
                        "after 26 s; begun on 2 ranks; resumed at step 10 on "
                        "3 ranks</p>"));
  EXPECT_THAT(page, HasSubstr("3 ranks on a (2 ranks), b (1 rank)"));
  EXPECT_THAT(page, HasSubstr("1,234,567 parameters"));
  EXPECT_THAT(page, HasSubstr("started 1970-01-01 00:01:40 UTC"));
  EXPECT_THAT(page, HasSubstr("<code>train --steps=20</code>"));
  EXPECT_THAT(page, HasSubstr("<a href=\"./memory0.html\">rank 0</a>"));
  run.from_page = "../run";
  EXPECT_THAT(ReportPage(run), HasSubstr("<a href=\"./../run/memory0.html\">"));
  EXPECT_THAT(ReportPage(RunOf(Lines(1, 1, 2), "{}")),
              HasSubstr("<h1>a/folder</h1>"));
}

TEST(ReportPageTest, ManyResumesAreCounted) {
  std::string lines = Lines(1, 1, 3);
  for (int i = 0; i < 6; ++i) lines += Lines(1, 3 + i, 4 + i);
  EXPECT_THAT(ReportPage(RunOf(lines, "{}")),
              HasSubstr("step 9 after 8 s; resumed 6 times; last resumed at "
                        "step 7</p>"));
}

TEST(ReportPageTest, ThePlanIsBesideWhatWasMeasured) {
  const std::string page =
      ReportPage(RunOf(absl::StrCat(Lines(101, 1, 10), Lines(203, 11, 15)),
                       absl::StrCat(R"({"plan": "a table",
                "planned": {"peak_bytes": 2097152, "step_ms": 70},)",
                                    std::string(kTwoStarts).substr(1))));
  EXPECT_THAT(page, HasSubstr("<td>2 MiB</td><td>1 MiB</td><td>0.5</td>"));
  // The median of steps 13 to 15: the last process without its first two.
  EXPECT_THAT(page, HasSubstr("<td>70 ms</td><td>140 ms</td><td>2</td>"));
  EXPECT_THAT(page, HasSubstr("<pre>a table</pre></details>"));
  EXPECT_THAT(ReportPage(RunOf(Lines(1, 1, 2), "{}")),
              Not(HasSubstr("Planned and measured")));
}

TEST(ReportPageTest, TilesFillTheirRows) {
  EXPECT_THAT(ReportPage(RunOf(Lines(1, 1, 9), "{}")),
              HasSubstr("--all:4;--half:2;--rest:1"));
  EXPECT_THAT(
      ReportPage(RunOf("{\"step\": 1000, \"loss\": 1, \"step_ms\": 2}", "{}")),
      HasSubstr("--all:3;--half:2;--rest:2\">\n<div class=\"tile\">"
                "<b>1,000</b>"));
}

}  // namespace
}  // namespace tessera
