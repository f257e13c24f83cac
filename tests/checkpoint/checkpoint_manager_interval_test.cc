// Tests how often checkpoints are saved by the clock, and by what saves cost.
#include <cmath>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/checkpoint_manager.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/checkpoint/checkpoint_manager_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

// The interval is either next to nothing or longer than the run.
TESSERA_RANK_FUNCTION(TrainByTheClock) {
  ManagerArgs a(args);
  a.options.every_steps = 0;
  a.options.keep_last = 100;
  a.options.on_signals = false;
  const bool often = a.steps == 4;
  a.options.every = often ? absl::Nanoseconds(1) : absl::Hours(1000);
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  TESSERA_ASSIGN_OR_RETURN(
      const auto manager,
      CheckpointManager::Create(trainee.engine.get(), a.options));
  return Run(trainee, *manager, std::nullopt, a.steps);
}

TEST_F(CheckpointManagerTest, SavesByTheClock) {
  RunOnRanks(2, "TrainByTheClock", absl::StrCat(dir_, "\n4"));
  EXPECT_THAT(Steps(), ElementsAre(4, 3, 2, 1));
  fs::remove_all(dir_);
  RunOnRanks(2, "TrainByTheClock", absl::StrCat(dir_, "\n3"));
  EXPECT_THAT(Steps(), ElementsAre(3));  // at the end
}

// Daly's interval of what saves have cost, by a clock that training and saves
// move: 118.67 s for 2 s and a mean of an hour.
TESSERA_RANK_FUNCTION(TrainByWhatSavesCost) {
  ManagerArgs a(args);
  absl::Duration now = absl::Hours(1);
  a.options.every_steps = a.options.keep_every = 0;
  a.options.keep_last = 100;
  a.options.mean_time_between_failures = absl::Hours(1);
  a.options.clock = [&now] { return now; };
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee, MakeTrainee(world));
  TESSERA_ASSIGN_OR_RETURN(
      const auto manager,
      CheckpointManager::Create(trainee.engine.get(), a.options));
  TESSERA_RETURN_IF_ERROR(manager->Resume().status());
  const auto position = [&] {
    now += absl::Seconds(2);
    return std::string();
  };
  std::string report = manager->Report();
  while (trainee.engine->step() < a.steps) {
    TESSERA_RETURN_IF_ERROR(trainee.TrainStep(trainee.engine->step()));
    now += absl::Minutes(1);
    TESSERA_RETURN_IF_ERROR(manager->MaybeSave(position).status());
  }
  TESSERA_RETURN_IF_ERROR(manager->Finish(position));
  return absl::StrCat(report, "; ", manager->Report());
}

TEST_F(CheckpointManagerTest, SavesAsOftenAsFailuresAndItsCostSay) {
  EXPECT_THAT(
      RunOnRanks(2, "TrainByWhatSavesCost", absl::StrCat(dir_, "\n8")),
      Each("no checkpoint saved; 5 saves, blocking training for 2s each; one "
           "every 1m58s"));
  EXPECT_THAT(Steps(), ElementsAre(8, 7, 5, 3, 1));
  // The report comes when the interval is first known, and at the end.
  std::vector<std::string> reports;
  for (absl::string_view line :
       absl::StrSplit(RankPool::Get(2)->stderr_of(0), '\n')) {
    if (absl::StrContains(line, "one every")) reports.emplace_back(line);
  }
  EXPECT_THAT(
      reports,
      ElementsAre(HasSubstr(dir_ + ": 1 save, blocking training "
                                   "for 2s; one every 1m58s"),
                  HasSubstr(dir_ + ": 5 saves, blocking training for 2s")));
  EXPECT_THAT(RankPool::Get(2)->stderr_of(1), Not(HasSubstr("one every")));
  // Nothing has happened since.
  EXPECT_THAT(RunOnRanks(2, "TrainByWhatSavesCost", absl::StrCat(dir_, "\n8")),
              Each(EndsWith("; nothing to save, step 8 is saved already")));
}

// Daly's figures for a mean of 24 hours and saves of 5 minutes.
TEST(OptimalSaveIntervalTest, IsYoungsWithDalysCorrection) {
  const absl::Duration young = absl::Seconds(std::sqrt(2 * 300.0 * 24 * 3600));
  const absl::Duration best =
      OptimalSaveInterval(absl::Minutes(5), absl::Hours(24));
  EXPECT_LT(best, young);
  EXPECT_GT(best, young - absl::Minutes(5));
  EXPECT_NEAR(absl::ToDoubleSeconds(best), 7001.3889, 0.0001);
  EXPECT_EQ(OptimalSaveInterval(absl::Hours(3), absl::Hours(1)),
            absl::Hours(1));
  EXPECT_EQ(OptimalSaveInterval(absl::ZeroDuration(), absl::Hours(1)),
            absl::ZeroDuration());
}

}  // namespace
}  // namespace tessera
