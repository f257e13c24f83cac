// Each optimizer with an engine: the same bits at every stage, over the tiers
// of offload, and where a run goes on from a checkpoint at another stage and
// number of ranks.
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/optim/optimizer_run.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

class OptimizersTest : public ::testing::TestWithParam<size_t> {
 protected:
  std::vector<std::string> Train(int world_size, const std::string& words) {
    return RunOnRanks(world_size, "TrainWith",
                      absl::StrCat("optimizer=", GetParam(), " ", words));
  }
};

TEST_P(OptimizersTest, HasTheSameBitsHoweverItIsSharded) {
  for (const char* dtype : {"fp32", "bf16"}) {
    const std::string words = absl::StrCat(" dtype=", dtype);
    const std::vector<std::string> replicated = Train(2, "stage=0" + words);
    EXPECT_THAT(replicated,
                Each(AllOf(replicated[0], HasSubstr("parameter in.weight"))));
    for (const char* how :
         {"stage=1", "stage=2", "stage=3", "stage=3 offload=nvme"}) {
      EXPECT_EQ(Train(2, how + words), replicated) << how << words;
    }
  }
}

// Of gradients that are the same on all ranks, and so in the mean.
TEST_P(OptimizersTest, DoesNotDependOnTheNumberOfRanks) {
  const std::string alone = Train(1, "stage=0 data=same")[0];
  EXPECT_THAT(alone, HasSubstr("parameter in.weight"));
  EXPECT_THAT(Train(2, "stage=3 data=same"), Each(alone));
  EXPECT_THAT(Train(4, "stage=2 data=same"), Each(alone));
}

TEST_P(OptimizersTest, GoesOnFromACheckpoint) {
  const TempFolder folder;
  const std::vector<std::string> whole = Train(2, "stage=1 steps=4");
  const std::string dir = folder.path() + "/checkpoint";
  Train(2, absl::StrCat("stage=3 steps=2 save=", dir));
  for (const char* how : {"stage=2", "stage=3 offload=nvme"}) {
    EXPECT_EQ(Train(2, absl::StrCat(how, " first=2 steps=2 load=", dir)), whole)
        << how;
  }
  // By one rank: only that the states are the same, by a step that one rank
  // makes from them.
  const std::vector<std::string> alone =
      Train(1, absl::StrCat("stage=0 first=2 steps=1 load=", dir));
  const std::string again = folder.path() + "/again";
  Train(2, absl::StrCat("stage=2 steps=0 load=", dir, " save=", again));
  EXPECT_EQ(Train(1, absl::StrCat("stage=0 first=2 steps=1 load=", again)),
            alone);
}

INSTANTIATE_TEST_SUITE_P(
    , OptimizersTest, ::testing::Range(size_t{0}, std::size(kOptimizerCases)),
    [](const auto& info) { return kOptimizerCases[info.param].name; });

}  // namespace
}  // namespace tessera
