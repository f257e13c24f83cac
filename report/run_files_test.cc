#include "report/run_files.h"

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/command/command_line.h"
#include "base/status_matchers.h"
#include "base/step_memory/memory_timeline.h"
#include "base/trace/trace_json.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "report/command.h"
#include "report/report_page.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;

std::string Folder(const std::string& name) {
  const std::string dir = absl::StrCat(testing::TempDir(), "/", name);
  std::filesystem::remove_all(dir);
  std::filesystem::create_directories(dir);
  return dir;
}

TEST(ReadMetricsTest, StepsInOrderAndGapsWhereNothingIs) {
  RunFiles run;
  ReadMetrics(
      "{\"step\": 2, \"loss\": 3}\n"
      "{\"step\": 1, \"loss\": \"NaN\", \"memory\": {\"parameters\": 7}}\n"
      "\n"
      "{\"step\": 2, \"loss\": 2.5, \"texts\": {\"a\": \"1\"}}\n",
      "m", &run);
  EXPECT_THAT(run.steps, ElementsAre(1, 2));
  EXPECT_TRUE(std::isnan(run.series["loss"][0]));
  EXPECT_EQ(run.series["loss"][1], 2.5);  // the later line
  EXPECT_EQ(run.series["memory.parameters"][0], 7);
  EXPECT_TRUE(std::isnan(run.series["memory.parameters"][1]));
  EXPECT_EQ(run.series.size(), 2u);
  EXPECT_TRUE(run.notes.empty());
}

// A skipped step has the number of the one before it; a run that went on from
// step 1 had them again.
TEST(ReadMetricsTest, SkippedStepsHaveLinesOfTheirOwn) {
  const auto line = [](int step, int skipped, int skipped_steps, int loss) {
    return absl::StrCat("{\"step\": ", step, ", \"skipped\": ", skipped,
                        ", \"skipped_steps\": ", skipped_steps,
                        ", \"loss\": ", loss, "}\n");
  };
  RunFiles run;
  ReadMetrics(absl::StrCat(line(1, 0, 0, 1), line(1, 1, 1, 2), line(1, 1, 2, 3),
                           line(2, 0, 2, 4), line(2, 1, 3, 5), line(1, 1, 1, 6),
                           line(1, 1, 2, 7), line(2, 0, 2, 8)),
              "m", &run);
  EXPECT_THAT(run.steps, ElementsAre(1, 1, 1, 2));
  EXPECT_THAT(run.series["loss"], ElementsAre(1, 6, 7, 8));
}

// Returns lines of steps whose loss is `loss`, a second apart from `time` on.
std::string Lines(int first, int last, int loss, int time) {
  std::string lines;
  for (int step = first; step <= last; ++step) {
    absl::StrAppend(&lines, "{\"step\": ", step, ", \"loss\": ", loss,
                    ", \"time\": ", time + (step - first), "}\n");
  }
  return lines;
}

// A program was started anew with the folder of an earlier run.
TEST(ReadMetricsTest, LaterStepsOfAnEarlierRunAreLeftOut) {
  RunFiles run;
  ReadMetrics(Lines(1, 5, 1, 10) + Lines(1, 2, 2, 100), "m", &run);
  EXPECT_THAT(run.steps, ElementsAre(1, 2));
  EXPECT_THAT(run.series["loss"], ElementsAre(2, 2));
  EXPECT_THAT(run.notes,
              ElementsAre("m: 3 lines of an earlier run in this folder are "
                          "left out (steps 3 to 5)"));
  // The earlier run had been resumed at step 3.
  RunFiles resumed;
  ReadMetrics(Lines(1, 4, 1, 10) + Lines(4, 5, 2, 50) + Lines(1, 4, 3, 100),
              "m", &resumed);
  EXPECT_THAT(resumed.series["loss"], ElementsAre(3, 3, 3, 3));
  EXPECT_THAT(resumed.notes,
              ElementsAre("m: 1 line of an earlier run in this folder is left "
                          "out (step 5)"));
  // The first step of the newer run was skipped.
  RunFiles skipped;
  ReadMetrics(Lines(1, 5, 1, 10) +
                  "{\"step\": 0, \"skipped\": 1, \"skipped_steps\": 1}\n" +
                  Lines(1, 1, 2, 100),
              "m", &skipped);
  EXPECT_THAT(skipped.steps, ElementsAre(0, 1));
}

TEST(ReadMetricsTest, StepsThatWereMadeAgainAreNotNoted) {
  RunFiles run;
  ReadMetrics(Lines(1, 5, 1, 10) + Lines(3, 6, 2, 100), "m", &run);
  EXPECT_THAT(run.series["loss"], ElementsAre(1, 1, 2, 2, 2, 2));
  EXPECT_THAT(run.notes, IsEmpty());
}

// A writer that is behind another one began no new run.
TEST(ReadMetricsTest, WritersMayBeApart) {
  RunFiles run;
  ReadMetrics(Lines(1, 3, 1, 10) + Lines(1, 2, 1, 10), "m", &run);
  EXPECT_THAT(run.steps, ElementsAre(1, 2, 3));
  EXPECT_THAT(run.notes, IsEmpty());
}

TEST(ReadMetricsTest, ALineOfAnEvaluationBelongsToItsStep) {
  RunFiles run;
  ReadMetrics(
      Lines(1, 3, 1, 10) + "{\"step\": 2, \"time\": 20, \"eval/loss\": 4}\n",
      "m", &run);
  EXPECT_THAT(run.steps, ElementsAre(1, 2, 3));
  EXPECT_THAT(run.series["loss"], ElementsAre(1, 1, 1));
  EXPECT_EQ(run.series["eval/loss"][1], 4);
  EXPECT_EQ(run.lines.size(), 3u);
}

TEST(ReadMetricsTest, BrokenLinesAreNoted) {
  RunFiles run;
  ReadMetrics(
      "{\"step\": 1}\nnonsense\n[3]\n{\"loss\": 1}\n{\"step\": 2}\n{\"st", "m",
      &run);
  EXPECT_THAT(run.steps, ElementsAre(1, 2));
  EXPECT_THAT(run.notes,
              ElementsAre(HasSubstr("m: 4 lines are no whole JSON object with "
                                    "a step, the first is line 2")));
  RunFiles torn;
  ReadMetrics("{\"step\": 1}\n{\"st", "m", &torn);
  EXPECT_THAT(torn.notes, ElementsAre(HasSubstr("line 2 (the last: the run")));
}

TEST(ReadRunFolderTest, ARunWithoutStepsSaysSo) {
  const std::string dir = Folder("early");
  ASSERT_TRUE(WriteFileAtomically(dir + "/run.json", "{}").ok());
  EXPECT_THAT(ReadRunFolder(dir)->notes,
              ElementsAre(HasSubstr("there is no metrics.jsonl")));
  ASSERT_TRUE(WriteFileAtomically(dir + "/metrics.jsonl", "").ok());
  EXPECT_THAT(ReadRunFolder(dir)->notes,
              ElementsAre(HasSubstr("metrics.jsonl holds no step")));
}

TEST(ReadRunFolderTest, NothingToShowIsAnError) {
  const std::string dir = Folder("empty");
  EXPECT_THAT(ReadRunFolder(dir),
              StatusIs(StatusCode::kNotFound, HasSubstr("holds none of")));
  EXPECT_THAT(ReadRunFolder(dir + "/x"),
              StatusIs(StatusCode::kNotFound, HasSubstr("there is none")));
  std::ostringstream out, err;
  const CommandLine tool("tessera", ReportCommands());
  EXPECT_EQ(tool.Run({"report", dir}, &out, &err), 1);
  EXPECT_EQ(tool.Run({"report", dir, dir}, &out, &err), 2);
  EXPECT_EQ(tool.Run({"report", "--what"}, &out, &err), 2);
  EXPECT_FALSE(std::filesystem::exists(dir + "/report.html"));
}

TEST(ReadRunFolderTest, FoldersOfRunsBelowAreNamed) {
  const std::string dir = Folder("below");
  for (const char* const below : {"log", "deep/run", "deep/too/deep", "none"}) {
    std::filesystem::create_directories(absl::StrCat(dir, "/", below));
  }
  std::ofstream(dir + "/log/run.json") << "{}";
  std::ofstream(dir + "/deep/run/metrics.jsonl") << "";
  std::ofstream(dir + "/deep/too/deep/metrics.jsonl") << "";
  EXPECT_THAT(
      ReadRunFolder(dir),
      StatusIs(StatusCode::kNotFound,
               HasSubstr(absl::StrCat("give the folder of the run "
                                      "itself: ",
                                      dir, "/deep/run or ", dir, "/log"))));
  EXPECT_THAT(ReadRunFolder(dir).status().message(),
              Not(HasSubstr("too/deep")));
}

TEST(ReportCommandTest, MakesNoFolder) {
  const std::string dir = Folder("out");
  std::ofstream(dir + "/run.json") << "{}";
  std::ostringstream out, err;
  const CommandLine tool("tessera", ReportCommands());
  const std::string page = dir + "/typo/r.html";
  EXPECT_EQ(tool.Run({"report", dir, "--out", page}, &out, &err), 1);
  EXPECT_THAT(err.str(), HasSubstr("there is no folder " + dir + "/typo"));
  EXPECT_FALSE(std::filesystem::exists(dir + "/typo"));
  EXPECT_EQ(tool.Run({"report", dir, "--out", dir + "/r.html"}, &out, &err), 0);
  EXPECT_TRUE(std::filesystem::exists(dir + "/r.html"));
}

TEST(ReadRunFolderTest, ALossThatIsNotFiniteIsNoted) {
  const std::string dir = Folder("diverged");
  const auto write = [&](const std::string& lines) {
    std::ofstream(dir + "/metrics.jsonl")
        << "{\"step\": 1, \"loss\": 2, \"eval/loss\": 3}\n"
        << lines;
  };
  write(
      "{\"step\": 2, \"loss\": \"NaN\"}\n{\"step\": 3, \"loss\": "
      "\"Infinity\"}\n{\"step\": 4}\n");
  TESSERA_ASSERT_OK_AND_ASSIGN(RunFiles run, ReadRunFolder(dir));
  EXPECT_THAT(run.notes, ElementsAre("the loss is not finite from step 2 on"));
  EXPECT_THAT(ReportPage(run),
              HasSubstr("<b>not finite</b><span>last loss</span>"));
  write("{\"step\": 2, \"loss\": \"NaN\"}\n{\"step\": 3, \"loss\": 1}\n");
  TESSERA_ASSERT_OK_AND_ASSIGN(run, ReadRunFolder(dir));
  EXPECT_THAT(run.notes, IsEmpty());
  EXPECT_THAT(ReportPage(run), HasSubstr("<b>1</b><span>last loss</span>"));
}

// A broken file does not hide the rest.
TEST(ReadRunFolderTest, BrokenFilesAreNoted) {
  const std::string dir = Folder("broken");
  std::ofstream(dir + "/metrics.jsonl") << "{\"step\": 1, \"loss\": 2}\n";
  std::ofstream(dir + "/run.json") << "{\"stage\":";
  std::ofstream(dir + "/trace.rank0.json") << "{}";
  TESSERA_ASSERT_OK_AND_ASSIGN(const RunFiles run, ReadRunFolder(dir));
  EXPECT_EQ(run.steps.size(), 1u);
  EXPECT_FALSE(run.run.has_value());
  EXPECT_FALSE(run.traces.has_value());
  EXPECT_THAT(run.notes, ElementsAre(HasSubstr("run.json:1:"),
                                     HasSubstr("trace.rank0.json")));
}

// Files that a memory_timeline wrote are told by how they begin.
TEST(ReadRunFolderTest, MemoryPagesAreFound) {
  const std::string dir = Folder("pages");
  std::ofstream(dir + "/run.json") << "{}";
  MemoryTimeline timeline;
  timeline.step = 3;
  for (const int rank : {10, 2}) {
    TESSERA_ASSERT_OK(WriteTimeline(timeline, dir + "/m", rank));
  }
  // A page of the same rank that was written before.
  TESSERA_ASSERT_OK(WriteTimeline(timeline, dir + "/old", 2));
  const std::filesystem::file_time_type now =
      std::filesystem::last_write_time(dir + "/m2.html");
  std::filesystem::last_write_time(dir + "/old2.html",
                                   now - std::chrono::hours(1));
  std::ofstream(dir + "/report.html") << "<title>a run</title>";
  std::ofstream(dir + "/memory.txt") << "<title>Memory of x, rank 1</title>";
  std::filesystem::create_directory(dir + "/folder.html");
  TESSERA_ASSERT_OK_AND_ASSIGN(const RunFiles run, ReadRunFolder(dir));
  EXPECT_THAT(run.memory_pages, ElementsAre(Pair("m2.html", "rank 2"),
                                            Pair("m10.html", "rank 10")));
}

TEST(PathFromPageTest, LeadsFromThePagesFolderToTheRuns) {
  EXPECT_EQ(PathFromPage("/a/run/report.html", "/a/run"), "");
  EXPECT_EQ(PathFromPage("/a/run/report.html", "/a/run/"), "");
  EXPECT_EQ(PathFromPage("/a/pages/x/report.html", "/a/run"), "../../run");
  EXPECT_EQ(PathFromPage("/a/report.html", "/a/b/../run"), "run");
  EXPECT_EQ(PathFromPage("report.html", "run"), "run");
  EXPECT_EQ(PathFromPage("pages/report.html", "run/"), "../run");
}

}  // namespace
}  // namespace tessera
