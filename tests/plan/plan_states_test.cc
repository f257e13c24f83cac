// Plans of optimizer states against engines, by groups of parameters.
#include <torch/torch.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "gtest/gtest.h"
#include "tests/plan/truth.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

// args: a TruthCase. Of optimizer states, after a step.
TESSERA_RANK_FUNCTION(BytesOfStates) {
  const TruthCase truth = TruthCase::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           TrainedEngine(truth, world.communicator()));
  return absl::StrCat(engine->state_bytes().optimizer);
}

// States depend on the algorithm; a frozen group has none.
TEST(PlanStatesTest, AreThoseOfEachGroup) {
  for (const char* const more :
       {"", " optimizer=Muon", " optimizer=SGD", " frozen=*.weight",
        " optimizer=Muon frozen=*.bias"}) {
    const std::string text = absl::StrCat("Gpt stage=3 world=2", more);
    const TruthCase truth = TruthCase::FromText(text);
    const auto report = PlanOf(truth);
    ASSERT_TRUE(report.ok()) << report.status();
    for (const auto& answer :
         RankPool::Get(truth.world)->Run("BytesOfStates", text)) {
      ASSERT_TRUE(answer.ok()) << answer.status();
      EXPECT_EQ(
          *answer,
          absl::StrCat(report->stages[3].between_steps[PlanKind::kOptimizer]))
          << text;
    }
  }
}

}  // namespace
}  // namespace tessera
