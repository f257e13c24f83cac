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

// Masters of 16 bits are the working copy on the CPU; of a unit on a device
// whose states are on a disk they lie there, too, and stream.
TEST(PlanStatesTest, MastersThatLeaveTheirDeviceStream) {
  const TruthModel model = MakeTruthModel("Gpt");
  const auto plan_of = [&](bool on_cpu, const std::string& more) {
    proto::Config config =
        TruthCase::FromText("Gpt stage=3 dtype=bf16 masters=bf16" + more)
            .config();
    config.mutable_sharding()->mutable_offload()->set_min_state_bytes(1);
    PlanOptions options;
    options.world_size = 2;
    options.on_cpu = on_cpu;
    return Plan(*model.module, model.loss, config, options);
  };
  const auto kept = plan_of(false, "");
  ASSERT_TRUE(kept.ok()) << kept.status();
  const PlannedBytes& bytes = kept->stages[3].between_steps;
  for (const bool on_cpu : {true, false}) {
    const auto moved = plan_of(on_cpu, " disk=states");
    ASSERT_TRUE(moved.ok()) << moved.status();
    EXPECT_EQ(moved->stages[3].disk.read,
              bytes[PlanKind::kOptimizer] +
                  (on_cpu ? 0 : bytes[PlanKind::kParameters]));
    EXPECT_EQ(moved->stages[3].disk.written, moved->stages[3].disk.read);
  }
}

}  // namespace
}  // namespace tessera
