// Tests what schedule-free AdamW evaluates a net with, on a device without
// hardware: every access is in order, and the bits are the CPU's, wherever
// states are.
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/equivalence/device_run.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

// args: a Way. Averages after the first steps, of which one is skipped if it
// may be, and what is trained on.
TESSERA_RANK_FUNCTION(EvaluateBetweenSteps) {
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run, DeviceRun::Make(WayOf(args), world));
  std::string text;
  for (int step = 0; step < 4; ++step) {
    TESSERA_RETURN_IF_ERROR(run.TrainStep(step == 1 ? kOverflow : 1));
    if (step == 0) continue;
    TESSERA_RETURN_IF_ERROR(run.engine->SwapInAverages());
    TESSERA_ASSIGN_OR_RETURN(const std::string averages, run.State());
    at::Tensor loss;
    {
      const torch::NoGradGuard no_grad;
      loss = run.net->forward(run.x);
    }
    TESSERA_RETURN_IF_ERROR(run.engine->SwapOutAverages());
    absl::StrAppend(&text, averages, "loss ", loss.cpu().item<float>(), "\n");
  }
  TESSERA_ASSIGN_OR_RETURN(const std::string end, run.Finish());
  return text + end;
}

// The device is known before the first backward, so the CPU comes last.
TEST(DeviceAverages, AreThoseOfTheCpuWhereverStatesAre) {
  RankPool* const pool = RankPool::Get(2);
  for (const int stage : {1, 3}) {
    Way way;
    way.stage = stage;
    way.fp16 = kBf16;
    way.optimizer = "AdamWScheduleFree";
    way.device = "1/workers";
    const auto expected = pool->Run("EvaluateBetweenSteps", TextOf(way));
    EXPECT_THAT(expected[0], IsOkAndHolds(HasSubstr("loss ")));
    const auto expect_same = [&] {
      const auto got = pool->Run("EvaluateBetweenSteps", TextOf(way));
      for (size_t rank = 0; rank < got.size(); ++rank) {
        ASSERT_THAT(expected[rank], IsOk());
        EXPECT_THAT(got[rank], IsOkAndHolds(*expected[rank])) << TextOf(way);
      }
    };
    for (const int offload : {1, 2, 3}) {
      if (stage < 3 && offload > 1) continue;
      way.offload = offload;
      expect_same();
    }
    way.offload = 0;
    way.device = "";
    expect_same();
  }
}

}  // namespace
}  // namespace tessera
