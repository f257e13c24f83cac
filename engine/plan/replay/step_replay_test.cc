// Replays of a step that is written down by hand, so that every byte can be
// counted.
#include "engine/plan/replay/step_replay.h"

#include "gtest/gtest.h"

namespace tessera {
namespace {

using Kind = TraceEvent::Kind;

// Two parameters of 640 and 1280 elements, each a flat. Forward uses both and
// saves 4000 bytes of each; backward uses them the other way round, and makes
// their gradients, 2560 and 5120 bytes.
class StepReplayTest : public ::testing::Test {
 protected:
  StepReplayTest() {
    trace_.parameters = {{"a.w", nullptr, 2560, true},
                         {"b.w", nullptr, 5120, true}};
    trace_.operators = {"aten::mm"};
    trace_.allocations.resize(4);
    Operator(/*unit=*/0, /*allocates=*/0, 4000);
    Operator(1, 1, 4000);
    trace_.allocations[0].last_forward_use = 1;
    trace_.allocations[1].last_forward_use = 4;
    backward_ = true;
    trace_.backward = trace_.events.size();
    Operator(1, 2, 5120);
    Add({Kind::kGradient, true, 1, 1, 2});
    Add({Kind::kFree, true, 1, 1, -1, 4000});
    Operator(0, 3, 2560);
    Add({Kind::kGradient, true, 0, 0, 3});
    Add({Kind::kFree, true, 0, 0, -1, 4000});

    options_.schedule.overlap = false;
    options_.schedule.prefetch = 0;
    options_.schedule.max_reuse_distance = 0;
    options_.gradients.overlap = false;
    options_.gradients.bucket_numel = 0;
    options_.world_size = 2;
  }

  void Add(const TraceEvent& event) { trace_.events.push_back(event); }
  void Operator(int unit, int allocates, int64_t bytes) {
    Add({Kind::kTouch, backward_, unit, unit});
    Add({Kind::kAllocate, backward_, allocates, unit, -1, bytes});
    Add({Kind::kOperator, backward_, 0, unit, -1, 100, 10});
  }

  StepReplayResult Replay(int stage) {
    std::vector<PlannedFlat> flats(2);
    for (PlannedFlat& flat : flats) {
      flat.whole_numel = &flat == &flats[0] ? 640 : 1280;
      flat.shard_numel = flat.whole_numel / 2;
      flat.sharded_optimizer = stage >= 1;
      flat.sharded_gradients = stage >= 2;
      flat.sharded_parameters = stage >= 3;
    }
    return ReplayStep(trace_, flats, {0, 1}, options_);
  }

  bool backward_ = false;
  Trace trace_;
  StepReplayOptions options_;
};

TEST_F(StepReplayTest, Stage0) {
  const StepReplayResult result = Replay(0);
  EXPECT_EQ(result.peak[PlanKind::kParameters], 1920 * 4);
  EXPECT_EQ(result.peak[PlanKind::kOptimizer], 2 * 1920 * 4);
  EXPECT_EQ(result.peak[PlanKind::kGathered], 0);
  // Local gradients stay from step to step; that of b is copied there.
  EXPECT_EQ(result.peak[PlanKind::kGradients], 1920 * 4);
  EXPECT_EQ(result.peak[PlanKind::kActivations], 8000 + 5120);
  EXPECT_EQ(result.peak[PlanKind::kKernels], 100);
  EXPECT_EQ(result.peak_event, 8);
  EXPECT_EQ(result.gathered_bytes, 0);
  EXPECT_EQ(result.reduced_bytes, 1920 * 4);
}

TEST_F(StepReplayTest, Stage3GathersOneUnitAtATime) {
  const StepReplayResult result = Replay(3);
  EXPECT_EQ(result.between_steps.total(), 960 * 4 + 2 * 960 * 4);
  // Both gathers of each: forward and backward, but b stays from one to the
  // other, since its backward comes next.
  EXPECT_EQ(result.gathered_bytes, (1280 + 640 + 640) * 4);
  // While b's gradient is copied: b is whole, and its local gradient is there.
  EXPECT_EQ(result.peak[PlanKind::kGathered], 1280 * 4);
  EXPECT_EQ(result.peak[PlanKind::kActivations], 8000 + 5120);
  EXPECT_EQ(result.peak[PlanKind::kGradients], 1280 * 4);
}

TEST_F(StepReplayTest, SmallFlatsAreReducedTogether) {
  options_.gradients.bucket_numel = 1920;
  const StepReplayResult result = Replay(2);
  // Both local ones, and both packed.
  EXPECT_EQ(result.peak[PlanKind::kGradients], 2 * 1920 * 4);
  options_.gradients.bucket_numel = 0;
  EXPECT_EQ(Replay(2).peak[PlanKind::kGradients], 1280 * 4);
}

TEST_F(StepReplayTest, AccumulationKeepsSums) {
  options_.micro_batches = 2;
  const StepReplayResult result = Replay(2);
  // The second micro-batch: b's local gradient beside the step's of both.
  EXPECT_EQ(result.peak[PlanKind::kGradients], (1280 + 960) * 4);
  EXPECT_EQ(result.reduced_bytes, 2 * 1920 * 4);
}

TEST_F(StepReplayTest, GradientsThatAreUsedUpAreGone) {
  options_.gradients.uses_up = true;
  EXPECT_EQ(Replay(0).peak[PlanKind::kGradients], 1280 * 4);
  EXPECT_EQ(Replay(0).between_steps[PlanKind::kGradients], 0);
  EXPECT_EQ(Replay(2).peak[PlanKind::kGradients], 1280 * 4);
}

TEST_F(StepReplayTest, SharedWorkingCopiesAreNotGathered) {
  options_.shares_working_copy = true;
  const StepReplayResult result = Replay(3);
  EXPECT_EQ(result.gathered_bytes, 0);
  EXPECT_EQ(result.peak[PlanKind::kParameters], 960 * 4);
}

TEST_F(StepReplayTest, CastsAreMadeAgainAndUseTheirParameter) {
  // What a saved was a cast of its weight, which backward uses by that alone.
  trace_.allocations[0].cast_of = 0;
  trace_.allocations[0].first_backward_use = 13;
  EXPECT_EQ(Replay(2).peak[PlanKind::kActivations], 4000 + 5120);
  const StepReplayResult result = Replay(3);
  EXPECT_EQ(result.peak[PlanKind::kActivations], 4000 + 5120);
}

TEST_F(StepReplayTest, ParametersOfNoEngineKeepTheirGradients) {
  std::vector<PlannedFlat> flats(1);
  flats[0].whole_numel = flats[0].shard_numel = 640;
  const StepReplayResult result = ReplayStep(trace_, flats, {0, -1}, options_);
  EXPECT_EQ(result.reduced_bytes, 640 * 4);
  EXPECT_EQ(result.peak[PlanKind::kActivations], 8000 + 5120);
  EXPECT_EQ(result.between_steps[PlanKind::kActivations], 0);
}

}  // namespace
}  // namespace tessera
