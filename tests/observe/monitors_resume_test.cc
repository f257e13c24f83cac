// Tests what monitors write of a training that goes on from a checkpoint, at
// another world size.
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/observe/metrics_lines.h"
#include "tests/observe/monitors_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// "spec\nfolder\nsteps": goes on from the checkpoint there, if there is one, by
// so many calls of Step, and saves; the number of steps.
TESSERA_RANK_FUNCTION(GoesOn) {
  const std::vector<std::string> lines = absl::StrSplit(args, '\n');
  const TrainingSpec spec = TrainingSpec::FromText(lines[0]);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  if (std::filesystem::exists(lines[1])) {
    TESSERA_RETURN_IF_ERROR(t.engine->LoadCheckpoint(lines[1]).status());
  }
  const auto first = t.engine->updates();
  for (int i = 0; i < std::stoi(lines[2]); ++i) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(first == 0 ? i : 0));
  }
  TESSERA_RETURN_IF_ERROR(t.engine->SaveCheckpoint(lines[1]));
  const auto steps = t.engine->step();
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return absl::StrCat(steps);
}

// Other world sizes have other batches.
TEST_F(MonitorsTest, SamplesGoOnAtAnotherWorldSize) {
  for (const std::string dtype : {"fp32", "fp16"}) {
    const std::string folder = folder_ / dtype;
    TrainingSpec spec = Spec(1, absl::StrCat(Jsonl(folder),
                                             ",csv_monitor{enabled:true,"
                                             "output_path:'",
                                             folder, "',job_name:'csv'}"));
    spec.model = "Overflows";  // at the second step, in float16
    spec.dtype = dtype;
    const std::string checkpoint = folder_ / (dtype + "/checkpoint");
    const int skipped = dtype == "fp16" ? 1 : 0;
    const auto goes_on = [&](int world_size, int steps) {
      return RunOnRanks(
          world_size, "GoesOn",
          absl::StrCat(spec.ToText(), "\n", checkpoint, "\n", steps));
    };
    EXPECT_THAT(goes_on(2, 4), Each(absl::StrCat(4 - skipped)));
    EXPECT_THAT(goes_on(3, 0), Each(absl::StrCat(4 - skipped)));
    EXPECT_THAT(goes_on(3, 2), Each(absl::StrCat(6 - skipped)));
    EXPECT_THAT(RankPool::Get(3)->stderr_of(0),
                HasSubstr(absl::StrCat("resumed at step ", 4 - skipped,
                                       " (8 samples) from ", checkpoint,
                                       ", ranks 3, stage 1, batch 3\n")));
    EXPECT_THAT(goes_on(1, 1), Each(absl::StrCat(7 - skipped)));
    EXPECT_THAT(
        RankPool::Get(1)->stderr_of(0),
        HasSubstr(absl::StrCat("resumed at step ", 6 - skipped,
                               " (14 samples) from ", checkpoint,
                               ", ranks 3 -> 1, stage 1, batch 3 -> 1: a step "
                               "has other samples than before, so a learning "
                               "rate")));
    std::vector<double> samples;
    for (const Line& line : LinesOf(folder)) {
      samples.push_back(line.at("samples"));
    }
    EXPECT_THAT(samples, ElementsAre(2, 4, 6, 8, 11, 14, 15));
    EXPECT_EQ(LinesOf(folder).back().at("skipped_steps"), skipped);
    EXPECT_EQ(LinesOf(folder).back().at("step"), 7 - skipped);
    const auto csv =
        ReadWholeFile(absl::StrCat(folder, "/csv/Train_Samples_lr.csv"));
    TESSERA_ASSERT_OK(csv.status());
    EXPECT_THAT(*csv, AllOf(HasSubstr("\n11,"), HasSubstr("\n15,")));
  }
}

}  // namespace
}  // namespace tessera
