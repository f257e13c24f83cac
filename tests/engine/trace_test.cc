// Traces of engines: the same bits with them, and what their files hold.
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/trace/exposed.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "report/trace_summary.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

constexpr int kWorld = 2, kSteps = 4;

TrainingSpec SpecOf(int stage) {
  TrainingSpec spec;
  spec.stage = stage;
  spec.steps = kSteps;
  spec.clipping = 1;
  // Values come by all-gathers, which all ranks make.
  spec.shared = spec.served = "off";
  return spec;
}

// args: stage, first and last step that are recorded, the rank that records
// (-1: all), "kineto" or "no", folder ("": no trace), and maybe a checkpoint,
// which is resumed, or written if it is not there. Returns the record, and at
// its end whether waits for communication were counted.
TESSERA_RANK_FUNCTION(TrainTraced) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  const TrainingSpec spec = SpecOf(std::stoi(words[0]));
  const std::shared_ptr<TestModel> model = BuildModel(spec.model, world.rank());
  proto::Config config = ConfigOf(spec);
  if (!words[5].empty()) {
    proto::Trace& trace = *config.mutable_trace();
    trace.set_enabled(true);
    trace.set_start_step(std::stoi(words[1]));
    trace.set_end_step(std::stoi(words[2]));
    if (words[3] != "-1") trace.add_ranks(std::stoi(words[3]));
    trace.set_kineto(words[4] == "kineto");
    trace.set_output_path(words[5]);
  }
  EngineOptions options;
  options.communicator = world.communicator();
  TESSERA_ASSIGN_OR_RETURN(const auto engine,
                           Engine::Create(model, config, options));
  const std::string checkpoint = words.size() > 6 ? words[6] : "";
  const bool goes_on =
      !checkpoint.empty() && std::filesystem::exists(checkpoint);
  if (goes_on) {
    TESSERA_RETURN_IF_ERROR(engine->LoadCheckpoint(checkpoint).status());
  }
  Record record;
  const int64_t exposed = ExposedCommNanos();
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, spec, world.rank(), 0, &record));
  bool waited = ExposedCommNanos() != exposed;
  TESSERA_RETURN_IF_ERROR(AddFinalState(*engine, *model, &record));
  if (!checkpoint.empty() && !goes_on) {
    TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(checkpoint));
  }
  // The first of two ranks to come waits, unless both come at once: then they
  // train on. That is not always the same one, and one rank may never wait.
  for (int round = 1; true; ++round) {
    TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                             world.communicator()->AllGatherStrings(
                                 waited ? "waited" : "", {"who waited"}));
    if (absl::c_linear_search(all, "waited")) break;
    if (round == 100) return absl::InternalError("no wait was counted");
    Record more;
    const int64_t before = ExposedCommNanos();
    TESSERA_RETURN_IF_ERROR(
        TrainSteps(*engine, *model, spec, world.rank(), 0, &more));
    waited = ExposedCommNanos() != before;
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return ToText(record);
}

std::vector<std::string> Train(const std::string& args) {
  std::vector<std::string> records;
  for (const auto& answer : RankPool::Get(kWorld)->Run("TrainTraced", args)) {
    TESSERA_EXPECT_OK(answer.status());
    records.push_back(answer.ok() ? *answer : "");
  }
  return records;
}

std::vector<TraceFile> ReadAll(const std::string& folder) {
  std::vector<TraceFile> files;
  for (int rank = 0; rank < kWorld; ++rank) {
    auto file =
        ReadTraceFile(absl::StrCat(folder, "/trace.rank", rank, ".json"));
    TESSERA_EXPECT_OK(file.status());
    if (file.ok()) files.push_back(*std::move(file));
  }
  return files;
}

// Returns "main/backward", "gather/ahead", ...
std::set<std::string> KindsOf(const TraceFile& file) {
  std::set<std::string> kinds;
  for (const SpanRecord& event : file.events) {
    if (event.track == "gather") {
      kinds.insert(event.ahead ? "gather/ahead" : "gather/asked");
    } else if (!event.wait.empty()) {
      kinds.insert("wait/" + event.wait);
    } else if (!event.op.empty()) {
      kinds.insert(event.track + "/" + event.op);
    } else if (event.track == "main" || event.track == "step") {
      kinds.insert(event.track + "/" + event.name);
    } else {
      kinds.insert(event.track);
    }
  }
  return kinds;
}

TEST(TraceTest, TheBitsAreTheSameAndTheFilesHoldTheSteps) {
  TempFolder folder;
  const std::vector<std::string> plain = Train("3 2 3 -1 no ");
  EXPECT_EQ(Train("3 2 3 -1 no " + folder.path()), plain);
  const std::vector<TraceFile> files = ReadAll(folder.path());
  ASSERT_EQ(files.size(), size_t{kWorld});
  for (const TraceFile& file : files) {
    EXPECT_EQ(file.world_size, kWorld);
    EXPECT_EQ(file.left_out, 0);
    EXPECT_THAT(KindsOf(file),
                IsSupersetOf(
                    {"steps", "units", "main/forward", "main/backward",
                     "main/optimizer step", "gather/ahead", "free", "reduce",
                     "step/update", "step/publish", "step/norm and clipping",
                     "communication/all-gather", "communication/reduce-scatter",
                     "communication/agreement"}));
  }
  TESSERA_ASSERT_OK_AND_ASSIGN(const TraceSummary summary, Summarize(files));
  ASSERT_EQ(summary.steps.size(), 2u);
  EXPECT_EQ(summary.steps[0].step, 2);
  for (const StepSummary& step : summary.by_rank) {
    EXPECT_GT(step.forward, 0);
    EXPECT_GT(step.backward, 0);
    EXPECT_GT(step.optimizer, 0);
    EXPECT_LE(step.forward + step.backward + step.optimizer, step.total);
    EXPECT_GT(step.communication, 0);
    EXPECT_LE(step.hidden, step.communication);
    EXPECT_LE(step.exposed, step.total);
  }
}

// Every collective of a recorded step has its counterpart in the other rank's
// file, which shows who came late.
TEST(TraceTest, CollectivesAreFoundInTheOtherRanksFile) {
  TempFolder folder;
  Train("3 1 2 -1 no " + folder.path());
  const std::vector<TraceFile> files = ReadAll(folder.path());
  ASSERT_EQ(files.size(), size_t{kWorld});
  std::set<std::string> of[kWorld];
  for (size_t rank = 0; rank < files.size(); ++rank) {
    const auto& events = files[rank].events;
    // Those at the ends may have been begun in another step on one rank.
    double begin = 0, end = 0;
    for (const SpanRecord& event : events) {
      if (event.track == "steps" && event.step == 1) begin = event.end;
      if (event.name == "optimizer step") end = event.begin;
    }
    for (const SpanRecord& event : events) {
      if (event.track != "communication") continue;
      if (event.begin - event.queued < begin || event.end > end) continue;
      of[rank].insert(
          absl::StrCat(event.group, "#", event.sequence, " ", event.name));
    }
  }
  EXPECT_GT(of[0].size(), 3u);
  EXPECT_EQ(of[0], of[1]);
}

TEST(TraceTest, StagesWithoutGathersHaveReductionsAndPublishes) {
  TempFolder folder;
  Train("1 2 3 -1 no " + folder.path());
  for (const TraceFile& file : ReadAll(folder.path())) {
    const std::set<std::string> kinds = KindsOf(file);
    EXPECT_THAT(kinds, IsSupersetOf({"steps", "main/forward", "reduce",
                                     "step/publish", "step/update"}));
    EXPECT_EQ(kinds.count("gather/ahead") + kinds.count("gather/asked"), 0u);
  }
}

TEST(TraceTest, KinetoRecordsTheSameStepsAndChangesNoBits) {
  TempFolder folder;
  const std::vector<std::string> plain = Train("3 2 3 -1 no ");
  EXPECT_EQ(Train("3 2 3 1 kineto " + folder.path()), plain);
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const std::string text,
      ReadWholeFile(folder / "kineto.rank1.json", int64_t{1} << 28));
  EXPECT_THAT(text, AllOf(HasSubstr("aten::"), HasSubstr("traceEvents")));
  // Only that rank has files.
  EXPECT_TRUE(std::filesystem::exists(folder / "trace.rank1.json"));
  EXPECT_FALSE(std::filesystem::exists(folder / "trace.rank0.json"));
  EXPECT_FALSE(std::filesystem::exists(folder / "kineto.rank0.json"));
}

TEST(TraceTest, WhatEndsBeforeLeavesWhatItHas) {
  TempFolder folder;
  Train("3 3 100 -1 no " + folder.path());
  TESSERA_ASSERT_OK_AND_ASSIGN(const TraceSummary summary,
                               Summarize(ReadAll(folder.path())));
  ASSERT_EQ(summary.steps.size(), 2u);
  EXPECT_EQ(summary.steps[0].step, 3);
  EXPECT_EQ(summary.steps[1].step, kSteps);
}

TEST(TraceTest, ARunThatGoesOnCountsOnAndKeepsTheOlderFiles) {
  TempFolder folder;
  const auto holds = [&](const std::string& name) {
    return std::filesystem::exists(folder / name);
  };
  std::ofstream(folder / "trace.rank2.json") << "of three ranks";
  const std::string args =
      absl::StrCat("3 1 2 -1 no ", folder.path(), " ", folder / "saved");
  Train(args);
  EXPECT_FALSE(holds("trace.rank2.json"));
  EXPECT_TRUE(holds("trace.rank2.json.previous"));
  EXPECT_FALSE(holds("trace.rank1.json.previous"));
  Train(args);
  EXPECT_TRUE(holds("trace.rank0.json.previous"));
  EXPECT_TRUE(holds("trace.rank1.json.previous"));
  TESSERA_ASSERT_OK_AND_ASSIGN(const TraceSummary summary,
                               Summarize(ReadAll(folder.path())));
  ASSERT_EQ(summary.steps.size(), 2u);
  EXPECT_EQ(summary.steps[0].step, kSteps + 1);
  EXPECT_EQ(summary.steps[1].step, kSteps + 2);
  // Rank 0 records no more: its file is of the recording before.
  Train(absl::StrCat("3 1 2 1 no ", folder.path()));
  EXPECT_TRUE(holds("trace.rank1.json"));
  EXPECT_FALSE(holds("trace.rank0.json"));
}

TEST(TraceTest, AFileThatCannotBeWrittenDoesNotStopTheRun) {
  TempFolder folder;
  std::ofstream(folder / "file") << "x";
  const std::vector<std::string> plain = Train("3 2 3 -1 no ");
  EXPECT_EQ(Train("3 2 3 -1 kineto " + (folder / "file")), plain);
}

}  // namespace
}  // namespace tessera
