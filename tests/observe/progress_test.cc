// What Progress shows of a training on two ranks, and that a program that never
// closes its engine is noticed.
#include "engine/progress.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "engine/observe/monitor.h"
#include "engine/program/unclosed.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Trains four steps of two micro-batches, each of which takes a second, with
// losses that are 10 more on rank 1 ("none": which has none). Returns what is
// shown; with "tokens" a sample has 8 of them, and the model's number of
// parameters is in front.
TESSERA_RANK_FUNCTION(ShowsProgress) {
  TrainingSpec spec;
  spec.accumulation = 2;
  spec.more = absl::StrContains(args, "print")
                  ? "steps_per_print:3"
                  : "flops_profiler{peak_tflops:0.000000001}";
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  std::string text;
  if (absl::StrContains(args, "tokens")) {
    t.engine->monitor().SetTokensPerSample(8);
    int64_t parameters = 0;
    for (const auto& p : t.model->parameters()) parameters += p.numel();
    absl::StrAppend(&text, parameters, "\n");
  }
  absl::Duration now = absl::Seconds(100);
  ProgressOptions options;
  options.steps = 4;
  options.out = std::tmpfile();
  options.line_each = absl::StrContains(args, "print") ? 0 : 2;
  options.clock = [&now] { return now; };
  {
    Progress progress(t.engine.get(), options);
    for (int i = 0; i < 8; ++i) {
      TESSERA_RETURN_IF_ERROR(t.TrainStep(i));
      now += absl::Seconds(1);
      const bool none = absl::StrContains(args, "none") && t.rank == 1;
      TESSERA_RETURN_IF_ERROR(
          progress.Show(none ? at::Tensor() : at::full({}, 10 * t.rank + i),
                        absl::StrCat("of ", i)));
    }
    absl::StrAppendFormat(&text, "%g\n", progress.loss());
  }
  std::rewind(options.out);
  char shown[2000] = {};
  (void)std::fread(shown, 1, sizeof(shown) - 1, options.out);
  std::fclose(options.out);
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return absl::StrCat(text, shown);
}

TEST(ProgressTest, TheMeanLossOfAllRanksAndTheirSpeed) {
  EXPECT_THAT(RunOnRanks(2, "ShowsProgress", ""),
              ElementsAre("11.5\n"
                          "1/4  00:02  loss 5.5000  lr 0.01  2.0 samples/s  "
                          "of 1\n"
                          "2/4  00:04<00:04  loss 7.5000  lr 0.01  2.0 "
                          "samples/s  of 3\n"
                          "4/4  00:08<00:00  loss 11.5000  lr 0.01  2.0 "
                          "samples/s  of 7\n",
                          "11.5\n"));
}

TEST(ProgressTest, ARankWithoutDataHasNoPartInTheMean) {
  EXPECT_THAT(RunOnRanks(2, "ShowsProgress", "none print"),
              ElementsAre("6.5\n"
                          "1/4  00:02  loss 0.5000  lr 0.01  2.0 samples/s  "
                          "of 1\n"
                          "3/4  00:06<00:02  loss 4.5000  lr 0.01  2.0 "
                          "samples/s  of 5\n"
                          "4/4  00:08<00:00  loss 6.5000  lr 0.01  2.0 "
                          "samples/s  of 7\n",
                          "6.5\n"));
}

// 16 tokens a second of two ranks, 6 operations for each parameter, of 1000 a
// second that a device can do.
TEST(ProgressTest, TokensAndMfuWhereTheyAreKnown) {
  std::vector<std::string> shown = RunOnRanks(2, "ShowsProgress", "tokens");
  const int64_t parameters = std::stoll(TakeFirstLines(&shown)[0]);
  EXPECT_THAT(
      shown[0],
      HasSubstr(absl::StrFormat(
          "4/4  00:08<00:00  loss 11.5000  lr 0.01  16 tok/s  mfu %.1f %%  "
          "of 7\n",
          100 * 6.0 * static_cast<double>(parameters) * 16 / 2 / 1000)));
}

// Trains a step, then 20 that are skipped. Returns what is shown.
TESSERA_RANK_FUNCTION(ShowsSkippedSteps) {
  TrainingSpec spec;
  spec.dtype = "bf16";
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  ProgressOptions options;
  options.steps = 50;
  options.line_each = 1;
  options.out = std::tmpfile();
  options.clock = [] { return absl::Seconds(1); };
  Progress progress(t.engine.get(), options);
  for (int i = 0; i < 22; ++i) {
    at::Tensor loss = t.model->parameters()[0].to(at::kFloat).sum();
    if (i > 1) loss = loss * std::numeric_limits<float>::infinity();
    TESSERA_RETURN_IF_ERROR(t.engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(t.engine->Step());
    TESSERA_RETURN_IF_ERROR(progress.Show(at::zeros({})));
  }
  std::rewind(options.out);
  char shown[4000] = {};
  (void)std::fread(shown, 1, sizeof(shown) - 1, options.out);
  std::fclose(options.out);
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return absl::StrCat(t.engine->last_step().skipped_steps, " skipped, ",
                      std::count(shown, shown + strlen(shown), '\n'), " lines");
}

// Two steps and the first skipped one have a line each; of the further skipped
// ones every tenth has.
TEST(ProgressTest, SkippedStepsAreNotALineEach) {
  EXPECT_EQ(RunOnRanks(2, "ShowsSkippedSteps", "")[0], "20 skipped, 5 lines");
}

// Shows two numbers on rank 1.
TESSERA_RANK_FUNCTION(ShowsNoLoss) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(TrainingSpec(), world.communicator()));
  ProgressOptions options;
  options.out = nullptr;
  Progress progress(t.engine.get(), options);
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  return progress.Show(at::zeros({t.rank + 1})).ToString();
}

TEST(ProgressTest, ALossThatIsNoneIsAnErrorOfAll) {
  EXPECT_THAT(RunOnRanks(2, "ShowsNoLoss", ""),
              Each(HasSubstr("INVALID_ARGUMENT: Progress: the loss of rank 1 "
                             "cannot be read; expected a tensor of one "
                             "number")));
}

// Returns how many engines were let go that had trained. args: "step", "close".
TESSERA_RANK_FUNCTION(LetsGo) {
  TakeUnclosedEngines();
  {
    TESSERA_ASSIGN_OR_RETURN(
        Trainee t, Trainee::Make(TrainingSpec(), world.communicator()));
    if (absl::StrContains(args, "step")) {
      TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
    }
    if (absl::StrContains(args, "close")) {
      TESSERA_RETURN_IF_ERROR(t.engine->Close());
    }
  }
  return absl::StrCat(TakeUnclosedEngines());
}

TEST(UnclosedEngineTest, IsOneThatHasTrained) {
  EXPECT_THAT(RunOnRanks(2, "LetsGo", "step"), Each("1"));
  EXPECT_THAT(RunOnRanks(2, "LetsGo", "step, close"), Each("0"));
  EXPECT_THAT(RunOnRanks(2, "LetsGo", ""), Each("0"));
}

}  // namespace
}  // namespace tessera
