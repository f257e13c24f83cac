// Traces are made by hand: it is known who waited for what, and so is what the
// summary must say.
#include "report/trace_summary.h"

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/command/command_line.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "base/trace/trace_json.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "report/command.h"
#include "report/trace_file.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kMs = 1000000;

// Recording makes one rank's recording; times are in milliseconds.
class Recording {
 public:
  void Step(int step, int begin, int end) {
    Add(TraceTrack::kSteps, "step", begin, end, "",
        absl::StrCat("\"step\":", step));
  }
  void Phase(const std::string& name, int begin, int end) {
    Add(TraceTrack::kMain, name, begin, end, "", "");
  }
  void Gather(const std::string& unit, int begin, int end, bool ahead) {
    Add(TraceTrack::kGather, "gather", begin, end, unit,
        ahead ? "\"ahead\":true" : "\"ahead\":false");
  }
  void Collective(const std::string& what, int call, int begin, int end,
                  int sequence, const std::string& group = "") {
    Add(TraceTrack::kCommunication, what, begin, end,
        std::string(UnitInText(what)),
        absl::StrCat("\"op\":\"all-gather\",\"sequence\":", sequence,
                     ",\"group\":\"", group,
                     "\",\"queued_us\":", (begin - call) * 1000));
  }
  void Wait(const std::string& what, int begin, int end,
            const std::string& reason = "gather") {
    Add(TraceTrack::kMain, absl::StrCat("wait: ", what), begin, end,
        std::string(UnitInText(what)),
        absl::StrCat("\"wait\":\"", reason, "\""));
  }
  void Disk(int begin, int end, int64_t bytes) {
    Add(TraceTrack::kDiskRead, "masters of unit a", begin, end, "a", "");
    recording_.spans.back().bytes = bytes;
  }

  // Through the file, as a run's.
  TraceFile File(int rank, int world_size, const std::string& host = "h") {
    const std::string path =
        absl::StrCat(testing::TempDir(), "/s.rank", rank, ".json");
    std::ofstream(path) << TraceToJson(recording_, {rank, world_size, host});
    auto file = ReadTraceFile(path);
    TESSERA_EXPECT_OK(file.status());
    return *std::move(file);
  }

 private:
  void Add(TraceTrack track, const std::string& name, int begin, int end,
           const std::string& unit, const std::string& args) {
    recording_.spans.push_back(
        {track, name, begin * kMs, end * kMs, unit, -1, args});
  }
  TraceRecording recording_;
};

TraceSummary SummaryOf(const std::vector<TraceFile>& files) {
  auto summary = Summarize(files);
  TESSERA_EXPECT_OK(summary.status());
  return *std::move(summary);
}

std::vector<double> Causes(const WaitSummary& wait) {
  return {wait.by_cause.begin(), wait.by_cause.end()};
}

TEST(TraceSummaryTest, PhasesAndWhatIsHidden) {
  Recording rank;
  rank.Step(3, 100, 200);
  rank.Phase("forward", 100, 140);
  rank.Phase("backward", 140, 190);
  rank.Phase("optimizer step", 190, 200);
  rank.Phase("compute again", 150, 155);
  rank.Collective("all-gather of unit a", 110, 110, 130, 1);
  rank.Collective("all-gather of unit b", 125, 125, 135, 2);  // overlap
  rank.Wait("all-gather of unit a", 120, 130);
  rank.Wait("own update", 191, 195, "update");
  rank.Wait("masters of unit a", 195, 198, "disk");
  rank.Disk(180, 210, 1000);  // ends in the next step
  rank.Step(4, 200, 230);
  const TraceSummary summary = SummaryOf({rank.File(0, 1)});
  ASSERT_EQ(summary.steps.size(), 2u);
  const StepSummary& step = summary.steps[0];
  EXPECT_EQ(step.step, 3);
  EXPECT_EQ(step.total, 100);
  EXPECT_EQ(step.forward, 40);
  EXPECT_EQ(step.backward, 50);
  EXPECT_EQ(step.optimizer, 10);
  EXPECT_EQ(step.recompute, 5);
  EXPECT_EQ(step.communication, 25);  // 110 to 135
  EXPECT_EQ(step.exposed, 10);
  EXPECT_EQ(step.hidden, 15);
  EXPECT_EQ(step.update_wait, 4);
  EXPECT_EQ(step.disk_wait, 3);
  EXPECT_EQ(step.disk_read, 20);
  EXPECT_EQ(step.disk_bytes_read, 0);
  EXPECT_EQ(summary.steps[1].disk_bytes_read, 1000);
  EXPECT_EQ(summary.steps[1].disk_read, 10);
  // Own waits are no communication.
  ASSERT_EQ(summary.waits.size(), 1u);
}

TEST(TraceSummaryTest, WhyAGatherWasWaitedFor) {
  Recording rank;
  rank.Step(1, 0, 100);
  // Begun when it was asked for.
  rank.Gather("a", 10, 20, /*ahead=*/false);
  rank.Collective("all-gather of unit a", 10, 10, 20, 1);
  rank.Wait("all-gather of unit a", 10, 20);
  // Begun 5 ms before; in the queue until 34.
  rank.Gather("b", 25, 40, /*ahead=*/true);
  rank.Collective("all-gather of unit b", 25, 34, 40, 2);
  rank.Wait("all-gather of unit b", 30, 40);
  // A sum is no collective of its own.
  rank.Collective("reduction of the gradients of unit a", 50, 50, 58, 3);
  rank.Wait("reduction of the gradients of unit a", 55, 58, "reduction");
  const TraceSummary summary = SummaryOf({rank.File(0, 2)});
  ASSERT_EQ(summary.waits.size(), 3u);
  for (const WaitSummary& wait : summary.waits) {
    if (wait.reason == "reduction") {
      EXPECT_EQ(wait.unit, "a");
      EXPECT_THAT(Causes(wait), ElementsAre(0, 0, 0, 0, 3));
    } else if (wait.unit == "a") {
      EXPECT_THAT(Causes(wait), ElementsAre(0, 0, 10, 0, 0));
    } else {
      EXPECT_THAT(Causes(wait), ElementsAre(4, 0, 0, 6, 0));
      EXPECT_EQ(wait.lead, 5);
    }
  }
  EXPECT_THAT(summary.notes, ElementsAre(HasSubstr("files of 1 of 2 ranks")));
  const std::string text = SummaryToText(summary, 10);
  EXPECT_THAT(text, HasSubstr("gather of unit a: not prefetched 100 %"));
  EXPECT_THAT(text, HasSubstr("gather of unit b: prefetched too late (5.00 ms "
                              "ahead) 60 %, queued behind others 40 %"));
  EXPECT_THAT(SummaryToText(summary, 1), HasSubstr("... and 2 more"));
}

// Rank 1 comes to the gather 7 ms after rank 0.
TEST(TraceSummaryTest, WhoCameLate) {
  const std::string what = "all-gather of unit a";
  Recording early, late;
  early.Step(1, 0, 100);
  early.Collective(what, 10, 10, 20, 5);
  early.Wait(what, 12, 20);
  late.Step(1, 0, 110);
  late.Collective(what, 17, 17, 20, 5);
  late.Wait(what, 17, 20);
  TraceSummary summary = SummaryOf({early.File(0, 2), late.File(1, 2)});
  ASSERT_EQ(summary.waits.size(), 1u);
  const WaitSummary& wait = summary.waits[0];
  EXPECT_EQ(wait.count, 2);
  EXPECT_EQ(wait.total, 11);
  EXPECT_THAT(Causes(wait), ElementsAre(0, 5, 6, 0, 0));
  EXPECT_EQ(wait.by_late_rank.at(1), 5);
  ASSERT_EQ(summary.rank_summaries.size(), 2u);
  EXPECT_EQ(summary.rank_summaries[0].others_waited, 0);
  EXPECT_EQ(summary.rank_summaries[1].others_waited, 5);
  EXPECT_EQ(summary.rank_summaries[1].work, 107);
  EXPECT_THAT(SummaryToText(summary, 10), HasSubstr("rank 1 came late 45 %"));
  // Collectives of another group, or clocks of another host, say nothing.
  Recording other;
  other.Step(1, 0, 110);
  other.Collective(what, 17, 17, 20, 6);
  other.Collective(what, 18, 18, 20, 5, "nodes 1.0");
  summary = SummaryOf({early.File(0, 2), other.File(1, 2)});
  EXPECT_TRUE(summary.waits[0].by_late_rank.empty());
  summary = SummaryOf({early.File(0, 2), late.File(1, 2, "another")});
  EXPECT_TRUE(summary.waits[0].by_late_rank.empty());
  EXPECT_THAT(summary.notes, ElementsAre(HasSubstr("several hosts")));
}

TEST(TraceSummaryTest, ErrorsNameTheFile) {
  Recording rank;
  rank.Phase("forward", 0, 1);
  EXPECT_THAT(Summarize({rank.File(0, 1)}).status().message(),
              HasSubstr("s.rank0.json: no whole step was recorded"));
  rank.Step(1, 0, 1);
  EXPECT_THAT(Summarize({rank.File(0, 1), rank.File(0, 1)}).status().message(),
              HasSubstr("rank 0 is there twice"));
  const std::string path = absl::StrCat(testing::TempDir(), "/other.json");
  std::ofstream(path) << "{\"traceEvents\":[]}";
  EXPECT_THAT(ReadTraceFile(path).status().message(),
              HasSubstr("other.json: is no trace of the configuration's"));
  std::ofstream(path) << "[1,";
  EXPECT_THAT(ReadTraceFile(path).status().message(),
              HasSubstr("other.json:1:"));
}

TEST(TraceCommandTest, MergesAndSummarizes) {
  const std::string dir = absl::StrCat(testing::TempDir(), "/traces");
  for (int r = 0; r < 2; ++r) {
    TraceRecording recording;
    recording.spans = {
        {TraceTrack::kSteps, "step 1", 0, kMs, "", -1, "\"step\":1"},
        {TraceTrack::kMain, "only\"here", 0, kMs}};
    TESSERA_ASSERT_OK(
        WriteFileAtomically(absl::StrCat(dir, "/trace.rank", r, ".json"),
                            TraceToJson(recording, {r, 2, "h"})));
  }
  std::ostringstream out, err;
  const auto run = [&](std::vector<std::string> args) {
    args.insert(args.begin(), "trace");
    return CommandLine("tessera", ReportCommands()).Run(args, &out, &err);
  };
  const std::string merged = absl::StrCat(dir, "/all.json");
  EXPECT_EQ(run({"merge", dir, merged}), 0) << err.str();
  TESSERA_ASSERT_OK_AND_ASSIGN(const JsonValue json, ReadLargeJson(merged));
  int spans = 0;
  for (const JsonValue& event : json.Find("traceEvents")->elements) {
    spans += event.Find("name")->text == "only\"here";
  }
  EXPECT_EQ(spans, 2);
  EXPECT_EQ(run({"summary", "--json", dir}), 0);
  EXPECT_THAT(out.str(), HasSubstr("\"ranks\":[0,1]"));
  EXPECT_EQ(run({"summary", "--jsn", dir}), 2);
  EXPECT_EQ(run({"merge", merged, merged}), 2);
  const std::string first = dir + "/trace.rank0.json",
                    last = dir + "/./trace.rank1.json";  // OUT is forgotten
  EXPECT_EQ(run({"merge", first, last}), 2);
  EXPECT_TRUE(ReadTraceFile(last).ok());
  EXPECT_EQ(run({"merge", first, "--out=x"}), 2);
  // This file belongs to another run.
  TESSERA_ASSERT_OK(WriteFileAtomically(dir + "/trace.rank2.json",
                                        TraceToJson({}, {2, 4, "h"})));
  EXPECT_EQ(run({"summary", dir}), 1);
  EXPECT_THAT(err.str(), HasSubstr("is of 4 ranks"));
  std::filesystem::remove(dir + "/trace.rank2.json");
  EXPECT_EQ(run({}), 2);
  EXPECT_EQ(run({"summary", dir + "/metrics.jsonl"}), 1);
  EXPECT_THAT(err.str(), HasSubstr("`tessera report FOLDER` shows it"));
  EXPECT_EQ(run({"summary", testing::TempDir() + "/none"}), 1);
  EXPECT_THAT(err.str(), HasSubstr("/none"));
}

}  // namespace
}  // namespace tessera
