// The best metric of a run: when training stops for it, which checkpoint is
// kept for it, and that a resumed run goes on with it.
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
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

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// `args`: "<dir> <until> <options> <metric of step 1> ...". Trains to the step
// `until`, or until the metric says so. Options: "a" saves in the background,
// "p" has a patience of 2, "r" returns to the best step at the end, "f" has a
// disk that is full in step 2.
TESSERA_RANK_FUNCTION(TrainForMetric) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  const std::string& how = words.at(2);
  CheckpointManagerOptions options;
  options.dir = words.at(0);
  options.every_steps = 1;
  options.keep_last = 1;
  options.keep_best = true;
  options.async = absl::StrContains(how, "a");
  options.patience = absl::StrContains(how, "p") ? 2 : 0;
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(world));
  TESSERA_ASSIGN_OR_RETURN(const auto manager,
                           CheckpointManager::Create(t.engine.get(), options));
  TESSERA_RETURN_IF_ERROR(manager->Resume().status());
  Engine& engine = *t.engine;
  bool stop = false;
  while (!stop && engine.step() < std::stoi(words.at(1))) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(engine.step()));
    const auto step = static_cast<size_t>(engine.step());
    const auto report = [&]() -> absl::Status {
      TESSERA_ASSIGN_OR_RETURN(
          stop, manager->ReportMetric(std::stod(words.at(step + 2))));
      return manager->MaybeSave().status();
    };
    const bool full = absl::StrContains(how, "f") && step == 2;
    TESSERA_RETURN_IF_ERROR(full ? WithFullDisk(t, report) : report());
  }
  TESSERA_RETURN_IF_ERROR(manager->Finish());
  const std::string ended =
      absl::StrCat("ended at ", engine.step(), ", best ",
                   *manager->best_metric(), " at ", *manager->best_step());
  if (!absl::StrContains(how, "r")) return ended;
  TESSERA_RETURN_IF_ERROR(manager->Resume(manager->best_step()).status());
  return absl::StrCat(ended, ", now at ", engine.step());
}

class CheckpointBestTest : public CheckpointManagerTest {
 protected:
  std::vector<std::string> TrainTo(int until, absl::string_view how,
                                   absl::string_view metrics) {
    return RunOnRanks(2, "TrainForMetric",
                      absl::StrCat(dir_, " ", until, " ", how, " ", metrics));
  }
  std::string Best() { return ReadWholeFile(dir_ + "/best").value(); }
};

TEST_F(CheckpointBestTest, TheBestIsKeptBesidesTheLast) {
  for (const char* const how : {"-", "a"}) {
    std::filesystem::remove_all(dir_);
    EXPECT_THAT(TrainTo(3, how, "5 3 4"), Each("ended at 3, best 3 at 2"));
    EXPECT_THAT(Steps(), ElementsAre(3, 2));
    EXPECT_EQ(Best(), "step-00000002\n");
    // A resumed run knows of it; a better one takes its place.
    EXPECT_THAT(TrainTo(4, how, "5 3 4 6"), Each("ended at 4, best 3 at 2"));
    EXPECT_THAT(Steps(), ElementsAre(4, 2));
    EXPECT_THAT(TrainTo(7, how, "5 3 4 6 2 nan 9"),
                Each("ended at 7, best 2 at 5"));
    EXPECT_THAT(Steps(), ElementsAre(7, 5));
    EXPECT_EQ(Best(), "step-00000005\n");
    EXPECT_EQ(Latest(), "step-00000007\n");
  }
  EXPECT_THAT(TrainTo(7, "r", ""), Each("ended at 7, best 2 at 5, now at 5"));
}

TEST_F(CheckpointBestTest, ABestThatIsNotSavedTakesNoOthersPlace) {
  EXPECT_THAT(TrainTo(3, "af", "5 3 4"), Each("ended at 3, best 3 at 2"));
  EXPECT_THAT(Steps(), ElementsAre(3, 1));
  EXPECT_EQ(Best(), "step-00000001\n");
  std::filesystem::remove(dir_ + "/best");
  EXPECT_THAT(TrainTo(4, "ar", "5 3 4 6"),
              Each("ended at 4, best 5 at 1, now at 1"));
  EXPECT_THAT(Steps(), ElementsAre(4, 1));
  EXPECT_EQ(Best(), "step-00000001\n");
}

TEST_F(CheckpointBestTest, TrainingStopsWhenPatienceEnds) {
  EXPECT_THAT(TrainTo(9, "p", "5 3 4 3 1 0 0 0 0"),
              Each("ended at 4, best 3 at 2"));
  // One report is in the checkpoint, the other one comes after it.
  std::filesystem::remove_all(dir_);
  EXPECT_THAT(TrainTo(3, "p", "5 3 4"), Each("ended at 3, best 3 at 2"));
  EXPECT_THAT(TrainTo(9, "p", "5 3 4 3 1 0 0 0 0"),
              Each("ended at 4, best 3 at 2"));
}

TESSERA_RANK_FUNCTION(ReportOther) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeTrainee(world));
  CheckpointManagerOptions options;
  options.dir = std::string(args);
  if (options.dir.empty()) options.patience = -1;
  if (options.dir.empty()) options.dir = "nowhere";
  TESSERA_ASSIGN_OR_RETURN(const auto manager,
                           CheckpointManager::Create(t.engine.get(), options));
  const absl::Status differs = manager->ReportMetric(world.rank()).status();
  const bool none = !manager->best_step().has_value();
  TESSERA_RETURN_IF_ERROR(manager->ReportMetric(0.5).status());
  return absl::StrCat(differs.ToString(), none ? ", none" : ", some", ", best ",
                      *manager->best_metric());
}

TEST_F(CheckpointBestTest, RanksReportTheSameMetric) {
  EXPECT_THAT(
      RunOnRanks(2, "ReportOther", dir_),
      Each(AllOf(HasSubstr("INVALID_ARGUMENT: the reported metric differs"),
                 HasSubstr(", none, best 0.5"))));
  EXPECT_THAT(RunOnRanks(2, "ReportOther", ""),
              Each(HasSubstr("min_delta and patience must be at least 0")));
}

}  // namespace
}  // namespace tessera
