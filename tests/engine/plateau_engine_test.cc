// Tests ReduceLROnPlateau: the rate follows what the program reports, is the
// same on all ranks, and goes on from a checkpoint.
#include <torch/torch.h>

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

// A rate of 1 that halves where two metrics in a row are no better.
proto::Config PlateauConfig(const TrainingSpec& spec) {
  proto::Config config = ConfigOf(spec);
  config.mutable_optimizer()->mutable_params()->set_lr(1);
  config.mutable_scheduler()->set_type("ReduceLROnPlateau");
  proto::SchedulerParams* params = config.mutable_scheduler()->mutable_params();
  params->set_factor(0.5);
  params->set_patience(1);
  params->set_cooldown(1);
  return config;
}

// `args` is "<first step> <last step> <folder>". Loads from the folder unless
// the run begins with step 0, and saves to it unless the run ends with the last
// step. Returns the rates.
TESSERA_RANK_FUNCTION(TrainByMetric) {
  constexpr double kMetrics[] = {3, 2, 2, 2, 2, 2, 2, 1, 1, 1};
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  TrainingSpec spec;
  spec.stage = 2;
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel(spec.model, world.rank()),
                               PlateauConfig(spec), world.communicator()));
  const int first = std::stoi(words[0]), last = std::stoi(words[1]);
  if (first > 0) {
    TESSERA_RETURN_IF_ERROR(t.engine->LoadCheckpoint(words[2]).status());
  }
  std::string rates;
  for (int step = first; step < last; ++step) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
    absl::StrAppend(&rates, t.engine->last_step().learning_rate, " ");
    TESSERA_RETURN_IF_ERROR(t.engine->ReportMetric(kMetrics[step]));
  }
  if (last < 10) TESSERA_RETURN_IF_ERROR(t.engine->SaveCheckpoint(words[2]));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return rates;
}

// Whatever of its state the checkpoint holds: best, counts, reductions.
TEST(PlateauTest, APlateauGoesOnFromACheckpointAtAnotherWorldSize) {
  EXPECT_THAT(RunOnRanks(2, "TrainByMetric", "0 10 -"),
              Each("1 1 1 1 0.5 0.5 0.5 0.25 0.25 0.25 "));
  const std::string rates = "1 1 1 1 0.5 0.5 0.5 0.25 0.25 0.25 ";
  for (int stop = 2; stop < 9; ++stop) {
    const TempFolder folder;
    const std::string first = RunOnRanks(
        2, "TrainByMetric", absl::StrCat("0 ", stop, " ", folder / "ckpt"))[0];
    for (const std::string& rest : RunOnRanks(
             3, "TrainByMetric", absl::StrCat(stop, " 10 ", folder / "ckpt"))) {
      EXPECT_EQ(first + rest, rates) << "stopped before step " << stop;
    }
  }
}

// Returns the errors of ranks whose metrics differ, and that no report came of
// it; NaNs count as equal.
TESSERA_RANK_FUNCTION(ReportDifferently) {
  TrainingSpec spec;
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel(spec.model, world.rank()),
                               PlateauConfig(spec), world.communicator()));
  std::string said;
  for (int i = 0; i < 3; ++i) {
    absl::StrAppend(&said, t.engine->ReportMetric(1 + world.rank()).ToString(),
                    "\n");
  }
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  absl::StrAppend(&said, t.engine->last_step().learning_rate, "\n");
  const double nan = std::nan("");
  for (int i = 0; i < 2; ++i) {
    TESSERA_RETURN_IF_ERROR(
        t.engine->ReportMetric(world.rank() == 0 ? nan : -nan));
  }
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  absl::StrAppend(&said, t.engine->last_step().learning_rate);
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return said;
}

TEST(PlateauTest, MetricsAreTheSameOnAllRanks) {
  EXPECT_THAT(
      RunOnRanks(2, "ReportDifferently", ""),
      Each(::testing::AllOf(
          HasSubstr("INVALID_ARGUMENT: the metric of ReportMetric differs "
                    "between rank 0 (1) and rank 1 (2)"),
          ::testing::EndsWith("\n1\n0.5"))));
}

}  // namespace
}  // namespace tessera
