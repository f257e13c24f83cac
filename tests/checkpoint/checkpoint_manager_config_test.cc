// Tests a CheckpointManager that the configuration tells when to save, and what
// to keep.
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/checkpoint_manager.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/checkpoint/checkpoint_manager_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// "<section>\n<how>": trains 5 steps with that section `checkpoint`. How: "k"
// sets keep_last to 3 and every_steps to 1, "d<dir>" the folder, "m" reports a
// metric that gets worse, "n" makes no manager.
TESSERA_RANK_FUNCTION(TrainAsConfigured) {
  const std::vector<std::string> lines = absl::StrSplit(args, '\n');
  const std::string& how = lines.at(1);
  TrainingSpec spec;
  spec.stage = 2;
  spec.more = absl::StrCat("checkpoint{", lines.at(0), "}");
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  if (how == "n") {
    for (int step = 0; step < 2; ++step) {
      TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
    }
    return std::string("trained");
  }
  CheckpointManagerOptions options;
  if (absl::StartsWith(how, "d")) options.dir = how.substr(1);
  if (how == "k") {
    options.keep_last = 3;
    options.every_steps = 1;
  }
  TESSERA_ASSIGN_OR_RETURN(const auto manager,
                           CheckpointManager::Create(t.engine.get(), options));
  if (how != "m") return Run(t, *manager, std::nullopt, 5);
  bool stop = false;
  while (!stop && t.engine->step() < 5) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(t.engine->step()));
    TESSERA_ASSIGN_OR_RETURN(
        stop, manager->ReportMetric(static_cast<double>(t.engine->step())));
  }
  return absl::StrCat("stopped at ", t.engine->step());
}

class CheckpointManagerConfigTest : public CheckpointManagerTest {
 protected:
  std::vector<std::string> Configured(const std::string& section,
                                      const std::string& how = "") {
    return RunOnRanks(2, "TrainAsConfigured",
                      absl::StrCat("folder:'", dir_, "',", section, "\n", how));
  }
  static const std::string& Log() { return RankPool::Get(2)->stderr_of(0); }
};

constexpr char kSection[] = "every_steps:2,keep_last:1,keep_every:4";

TEST_F(CheckpointManagerConfigTest, TheConfigurationSaysWhenAndWhat) {
  EXPECT_THAT(Configured(kSection), Each("began, ended at 5"));
  EXPECT_THAT(Steps(), ElementsAre(5, 4));
  EXPECT_THAT(Log(), AllOf(HasSubstr(absl::StrCat(
                               dir_,
                               ": removed step-00000002; kept: the last "
                               "checkpoint (keep_last), multiples of 4 steps "
                               "(keep_every); logged once")),
                           Not(HasSubstr("nothing is saved"))));
}

TEST_F(CheckpointManagerConfigTest, TheProgramsOptionsGoBefore) {
  EXPECT_THAT(Configured(kSection, "k"), Each("began, ended at 5"));
  EXPECT_THAT(Steps(), ElementsAre(5, 4, 3, 2));
  EXPECT_THAT(Log(), HasSubstr("kept: the last 3 checkpoints (keep_last)"));
  const std::string other = folder_ / "other";
  EXPECT_THAT(Configured(kSection, "d" + other), Each("began, ended at 5"));
  EXPECT_EQ(ListStepFolders(other, FileSystem::Real()).value().size(), 2u);
}

TEST_F(CheckpointManagerConfigTest, RemovalsAreSaidOnce) {
  (void)Configured("every_steps:1,keep_last:1");
  EXPECT_THAT(Steps(), ElementsAre(5));
  EXPECT_THAT(Log(), HasSubstr(": removed step-00000001;"));
  EXPECT_THAT(Log(), Not(HasSubstr(": removed step-00000002;")));
}

TEST_F(CheckpointManagerConfigTest, ItSaysWhatAMetricEnds) {
  EXPECT_THAT(Configured("patience:2", "m"), Each("stopped at 3"));
  EXPECT_THAT(Configured("patience:2,larger_is_better:true", "m"),
              Each("stopped at 5"));
}

TEST_F(CheckpointManagerConfigTest, OneOfBothNamesTheFolder) {
  EXPECT_THAT(RunOnRanks(2, "TrainAsConfigured", "every_steps:2\n"),
              Each(HasSubstr("there is no folder: set "
                             "CheckpointManagerOptions::dir, or "
                             "checkpoint.folder in the configuration")));
}

// Keys that nobody reads are no silent loss of days.
TEST_F(CheckpointManagerConfigTest, WithoutAManagerThereIsAWarning) {
  EXPECT_THAT(Configured(kSection, "n"), Each("trained"));
  EXPECT_THAT(Log(), HasSubstr("checkpoint.every_steps: nothing is saved by "
                               "this key"));
  EXPECT_THAT(RunOnRanks(2, "TrainAsConfigured", "async:true\nn"),
              Each("trained"));
  EXPECT_THAT(Log(), Not(HasSubstr("nothing is saved")));
}

}  // namespace
}  // namespace tessera
