// Tests what monitors write of a training, and that the training does not
// change, on two ranks, at every stage.
#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/thread/wait_clock.h"
#include "base/trace/exposed.h"
#include "comm/fake_communicator_test_util.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "engine/observe/monitor.h"
#include "gmock/gmock.h"
#include "tests/observe/metrics_lines.h"
#include "tests/observe/monitors_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::DoubleEq;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Gt;
using ::testing::HasSubstr;
using ::testing::Key;
using ::testing::Not;
using ::testing::SizeIs;

constexpr int kWorldSize = 2;

// ---- the same bits

TEST_F(MonitorsTest, TheTrainingIsTheOraclesAtEveryStage) {
  for (int stage = 0; stage <= 3; ++stage) {
    const std::string folder = folder_ / absl::StrCat(stage);
    TrainingSpec spec = Spec(stage, Everything(folder));
    spec.model = "Gpt";  // dropout: no random number is drawn
    spec.accumulation = 2;
    spec.clipping = 0.5;
    ExpectEqualsOracle(spec, kWorldSize);
    EXPECT_THAT(LinesOf(folder), SizeIs(spec.steps)) << "stage " << stage;
  }
}

TEST_F(MonitorsTest, SkippedStepsAreTheSame) {
  for (const int stage : {1, 3}) {
    const std::string folder = folder_ / absl::StrCat(stage);
    TrainingSpec spec = Spec(stage, Everything(folder));
    spec.model = "Overflows";
    spec.dtype = "fp16";
    spec.steps = 4;
    ExpectEqualsOracle(spec, kWorldSize);
    const std::vector<Line> lines = LinesOf(folder);
    ASSERT_THAT(lines, SizeIs(4));
    // Steps are numbered as Engine::step(), samples are of skipped ones, too.
    const int steps[] = {1, 1, 2, 3}, skipped[] = {0, 1, 0, 0};
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(lines[i].at("step"), steps[i]);
      EXPECT_EQ(lines[i].at("skipped"), skipped[i]);
      EXPECT_EQ(lines[i].at("skipped_steps"), i == 0 ? 0 : 1);
      EXPECT_EQ(lines[i].at("samples"), 2 * (i + 1));
    }
    EXPECT_EQ(lines[0].at("loss_scale"), 65536);
  }
}

// ---- what is written

// Trains `spec` and says its own losses, one a line, in full. args: the spec;
// before it "two " if each micro-batch has two, of which it says the sum.
TESSERA_RANK_FUNCTION(Losses) {
  const int num_losses = absl::ConsumePrefix(&args, "two ") ? 2 : 1;
  const TrainingSpec spec = TrainingSpec::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  std::vector<std::string> losses;
  for (int i = 0; i < spec.steps * spec.accumulation; ++i) {
    double sum = 0;
    BackwardOptions options;
    if (spec.weights) options.weight = WeightOf(t.rank, i);
    for (int of_it = num_losses; of_it > 0; --of_it) {
      const at::Tensor loss = t.Loss(num_losses * i + of_it - 1);
      sum += loss.item<double>();
      options.more_losses = of_it > 1;
      TESSERA_RETURN_IF_ERROR(t.engine->Backward(loss, options));
    }
    losses.push_back(absl::StrCat(
        static_cast<int64_t>(std::llround(sum * (int64_t{1} << 40)))));
    TESSERA_RETURN_IF_ERROR(t.engine->Step());
  }
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return absl::StrJoin(losses, "\n");
}

// Returns the losses by rank and micro-batch.
std::vector<std::vector<double>> LossesOf(const TrainingSpec& spec,
                                          absl::string_view before = "") {
  std::vector<std::vector<double>> all;
  for (const std::string& answer :
       RunOnRanks(kWorldSize, "Losses", absl::StrCat(before, spec.ToText()))) {
    all.emplace_back();
    for (absl::string_view line : absl::StrSplit(answer, '\n')) {
      int64_t scaled = 0;
      EXPECT_TRUE(absl::SimpleAtoi(line, &scaled)) << answer;
      all.back().push_back(static_cast<double>(scaled) / (int64_t{1} << 40));
    }
  }
  return all;
}

TEST_F(MonitorsTest, TheLossIsTheMeanOverRanksAndMicroBatches) {
  TrainingSpec spec = Spec(2, Jsonl(folder_.path()));
  spec.accumulation = 2;
  const auto losses = LossesOf(spec);
  const std::vector<Line> lines = LinesOf(folder_.path());
  ASSERT_THAT(lines, SizeIs(3));
  for (size_t step = 0; step < 3; ++step) {
    const Line& line = lines[step];
    const double mean = (losses[0][2 * step] + losses[0][2 * step + 1] +
                         losses[1][2 * step] + losses[1][2 * step + 1]) /
                        4;
    EXPECT_THAT(line.at("loss"), DoubleEq(mean));
    EXPECT_EQ(line.at("step"), step + 1);
    EXPECT_EQ(line.at("samples"), 4 * (step + 1));
    EXPECT_EQ(line.at("lr"), 0.01);
    for (const char* key :
         {"time", "step_ms", "forward_ms", "backward_ms", "backward_inner_ms",
          "update_ms", "samples_per_second", "memory_peak_bytes",
          "step_ms_slowest", "forward_ms_fastest"}) {
      EXPECT_THAT(line, Contains(testing::Pair(key, Gt(0)))) << key;
    }
    EXPECT_GE(
        line.at("step_ms"),
        line.at("forward_ms") + line.at("backward_ms") + line.at("update_ms"));
    // Ranks wait for each other, or find that they need not.
    EXPECT_GE(line.at("exposed_comm_ms"), 0);
    EXPECT_LT(line.at("exposed_comm_ms"), line.at("step_ms"));
    // Nothing asks for it, and it is not made for this.
    EXPECT_THAT(line, Not(Contains(Key("grad_norm"))));
    EXPECT_THAT(line, Not(Contains(Key("tokens"))));
  }
}

// The losses of one micro-batch, which add up, count once.
TEST_F(MonitorsTest, WeightsCount) {
  for (const bool two : {false, true}) {
    const std::string folder = folder_ / (two ? "two" : "one");
    TrainingSpec spec = Spec(1, Jsonl(folder));
    spec.weights = true;
    const auto losses = LossesOf(spec, two ? "two " : "");
    const std::vector<Line> lines = LinesOf(folder);
    ASSERT_THAT(lines, SizeIs(3));
    for (int step = 0; step < 3; ++step) {
      double sum = 0, weight = 0;
      for (int rank = 0; rank < kWorldSize; ++rank) {
        const double own = WeightOf(rank, step);
        sum +=
            own * losses[static_cast<size_t>(rank)][static_cast<size_t>(step)];
        weight += own;
      }
      EXPECT_THAT(lines[static_cast<size_t>(step)].at("loss"),
                  DoubleEq(sum / weight));
    }
  }
}

TEST_F(MonitorsTest, DeepSpeedsNamesAreInItsLayout) {
  (void)LossesOf(Spec(3, Everything(folder_.path())));
  const std::vector<Line> lines = LinesOf(folder_.path());
  ASSERT_THAT(lines, SizeIs(3));
  const auto csv = ReadWholeFile(folder_ / "csv/Train_Samples_train_loss.csv");
  TESSERA_ASSERT_OK(csv.status());
  std::vector<std::string> rows = absl::StrSplit(*csv, '\n');
  ASSERT_THAT(rows, SizeIs(5));
  EXPECT_EQ(rows[0], "step,train_loss");
  for (size_t i = 0; i < 3; ++i) {
    const std::vector<std::string> parts = absl::StrSplit(rows[i + 1], ',');
    EXPECT_EQ(parts[0], absl::StrCat(2 * (i + 1)));
    double loss = 0;
    ASSERT_TRUE(absl::SimpleAtod(parts[1], &loss));
    EXPECT_EQ(loss, lines[i].at("loss"));
  }
  TESSERA_EXPECT_OK(
      ReadWholeFile(folder_ / "csv/Train_Samples_lr.csv").status());
  int events = 0;
  for (const auto& file :
       std::filesystem::directory_iterator(folder_ / "events")) {
    EXPECT_GT(std::filesystem::file_size(file.path()), 300);
    ++events;
  }
  EXPECT_EQ(events, 1);
}

// A program adds numbers of its own.
TESSERA_RANK_FUNCTION(Adds) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  Monitor& monitor = t.engine->monitor();
  if (monitor.writes() != (t.rank == 0 && !spec.more.empty())) {
    return absl::InternalError("writes() is wrong");
  }
  monitor.AddScalar("before", 1);
  monitor.SetTokensPerSample(10);
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  monitor.AddScalar("eval/loss", 0.25);
  monitor.AddHistogram("h", torch::tensor({1.0f, 2.0f}));
  monitor.AddText("note", "said");
  monitor.CountTokens(t.rank == 0 ? 3 : 4);
  TESSERA_RETURN_IF_ERROR(t.TrainStep(1));
  const StepRecord* const last = monitor.last();
  const std::string seen =
      last == nullptr ? "none" : absl::StrCat(last->step, " ", last->tokens);
  monitor.AddScalar("after", 2);
  // Even without Close the last step is reported.
  t.engine.reset();
  return seen;
}

TEST_F(MonitorsTest, WhatAProgramAddsBelongsToTheLastStep) {
  const TrainingSpec spec = Spec(1, Jsonl(folder_.path()));
  EXPECT_THAT(RunOnRanks(kWorldSize, "Adds", spec.ToText()), Each("1 20"));
  const std::vector<Line> lines = LinesOf(folder_.path());
  ASSERT_THAT(lines, SizeIs(2));
  EXPECT_EQ(lines[0].at("eval/loss"), 0.25);
  EXPECT_THAT(lines[0],
              AllOf(Contains(Key("histograms")), Contains(Key("texts"))));
  EXPECT_EQ(lines[0].at("tokens"), 20);
  EXPECT_EQ(lines[1].at("tokens"), 7);
  EXPECT_EQ(lines[1].at("after"), 2);
  // 6 operations for each parameter and token.
  EXPECT_GT(lines[1].at("tflops"), 0);
}

// A loader and collectives report these waits.
TESSERA_RANK_FUNCTION(WaitsForData) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(args), world.communicator()));
  for (const int64_t milliseconds : {0, 8, 0}) {
    const int64_t nanos = t.rank == 1 ? milliseconds * 1'000'000 : 0;
    AddDataWait(nanos);
    NoteExposedWait(WaitReason::kOther, "a test", 0, nanos);
    TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  }
  return std::string();
}

TEST_F(MonitorsTest, WaitsAreThoseOfTheRankThatWaitsLongest) {
  RunOnRanks(kWorldSize, "WaitsForData",
             Spec(2, Jsonl(folder_.path())).ToText());
  const std::vector<Line> lines = LinesOf(folder_.path());
  ASSERT_THAT(lines, SizeIs(3));
  EXPECT_EQ(lines[0].at("data_wait_ms"), 0);
  EXPECT_THAT(lines[1].at("data_wait_ms"), DoubleEq(8));
  EXPECT_GE(lines[1].at("exposed_comm_ms"), 8);
  EXPECT_EQ(lines[2].at("data_wait_ms"), 0);
}

TEST_F(MonitorsTest, WithoutMonitorsNothingIsKept) {
  EXPECT_THAT(RunOnRanks(kWorldSize, "Adds", Spec(1, "").ToText()),
              Each("none"));
}

// ---- what it costs in messages

TESSERA_RANK_FUNCTION(CountExchanges) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  auto comm = std::make_shared<FakeCommunicator>(world.communicator());
  TESSERA_ASSIGN_OR_RETURN(Trainee t, Trainee::Make(spec, comm));
  comm->Take();
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*t.engine, *t.model, spec, t.rank, /*first=*/0, &record));
  int own = 0, all = 0;
  for (const auto& call : comm->Take()) {
    ++all;
    own += call.what == "metrics of a step";
  }
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  for (const auto& call : comm->Take()) own += call.what == "metrics of a step";
  return absl::StrCat(own, " ", all);
}

// "own all" of five steps: those of metrics, and all until the last Step.
std::vector<int> Exchanges(int stage, const std::string& more) {
  TrainingSpec spec;
  spec.stage = stage;
  spec.steps = 5;
  spec.more = more;
  const auto answers = RunOnRanks(kWorldSize, "CountExchanges", spec.ToText());
  EXPECT_THAT(answers, Each(answers[0]));
  std::vector<int> counts;
  for (absl::string_view word : absl::StrSplit(answers[0], ' ')) {
    counts.push_back(0);
    EXPECT_TRUE(absl::SimpleAtoi(word, &counts.back())) << answers[0];
  }
  return counts;
}

TEST_F(MonitorsTest, OneSmallMessageForEachStepThatIsTold) {
  for (const int stage : {0, 3}) {
    const std::vector<int> none = Exchanges(stage, "");
    EXPECT_EQ(none[0], 0);
    EXPECT_THAT(Exchanges(stage, Jsonl(folder_.path())),
                ElementsAre(5, none[1] + 5));
    EXPECT_THAT(Exchanges(stage, "steps_per_print:2"),
                ElementsAre(2, none[1] + 2));
    EXPECT_THAT(Exchanges(stage,
                          "comms_logger{enabled:true},"
                          "flops_profiler{enabled:true}"),
                ElementsAre(0, none[1]));
  }
}

// ---- errors

TESSERA_RANK_FUNCTION(CreateFails) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  auto failed = Trainee::Make(spec, world.communicator());
  if (failed.ok()) return "created";
  // The module is whole again, and another engine may have it.
  TrainingSpec plain = spec;
  plain.more.clear();
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(plain, world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return std::string(failed.status().message());
}

TEST_F(MonitorsTest, AFolderThatCannotBeIsAnErrorOnAllRanks) {
  const std::string file = folder_ / "file";
  ASSERT_EQ(::symlink("/dev/null", file.c_str()), 0);
  for (const char* section : {"jsonl_monitor", "csv_monitor", "tensorboard"}) {
    const TrainingSpec spec = Spec(
        1, absl::StrCat(section, "{enabled:true,output_path:'", file, "'}"));
    const auto answers = RunOnRanks(kWorldSize, "CreateFails", spec.ToText());
    EXPECT_THAT(answers,
                Each(AllOf(HasSubstr(absl::StrCat(section, ".output_path: ")),
                           HasSubstr(file), HasSubstr("rank 0"))));
  }
}

// The first line fails already; nobody has to notice but the log.
TEST_F(MonitorsTest, AFullDiskDoesNotEndTheTraining) {
  std::filesystem::create_directory(folder_ / "run");
  ASSERT_EQ(::symlink("/dev/full", (folder_ / "run/metrics.jsonl").c_str()), 0);
  ExpectEqualsOracle(Spec(3, Jsonl(folder_.path())), kWorldSize);
}

}  // namespace
}  // namespace tessera
