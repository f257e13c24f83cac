#include "engine/plan/stage_choice.h"

#include <limits>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

// Units as they are planned at a stage over a shard group.
PlannedFlats At(int stage, int group_size, std::vector<PlannedFlat> flats) {
  PlannedFlats planned;
  for (PlannedFlat& flat : flats) {
    flat.shard_numel = flat.whole_numel / group_size;
    flat.sharded_optimizer = stage >= 1;
    flat.sharded_gradients = stage >= 2;
    flat.sharded_parameters = stage >= 3;
  }
  planned.flats = std::move(flats);
  return planned;
}
PlannedFlat Unit(int64_t numel, int64_t working_bytes = 4) {
  PlannedFlat flat;
  flat.whole_numel = numel;
  flat.working_bytes = working_bytes;
  return flat;
}

// 1280 elements in units of 768 and 512.
std::vector<PlannedFlat> Fp32() { return {Unit(768), Unit(512)}; }
std::vector<PlannedFlat> Bf16() {
  std::vector<PlannedFlat> flats = Fp32();
  for (PlannedFlat& f : flats) {
    f.working_bytes = f.reduce_bytes = 2;
    f.master_bytes = 4;
    f.keeps_sums = false;
  }
  return flats;
}

TEST(ModelStateBytes, Float32) {
  const auto total = [](int stage) {
    return ModelStateBytes(At(stage, 4, Fp32()), {}).total();
  };
  EXPECT_EQ(total(0), 16 * 1280);
  EXPECT_EQ(total(1), 8 * 1280 + 8 * 320);
  EXPECT_EQ(total(2), 4 * 1280 + 12 * 320 + 2 * 4 * 768);
  EXPECT_EQ(total(3), 16 * 320 + 5 * 4 * 768);
}

// ZeRO's figures: 2 + 2 + 12 bytes of an element, of which here the gradient
// that the optimizer reads is of float32 too.
TEST(ModelStateBytes, BFloat16) {
  const PlannedBytes replicated = ModelStateBytes(At(0, 4, Bf16()), {});
  EXPECT_EQ(replicated[PlanKind::kParameters], 2 * 1280);
  EXPECT_EQ(replicated[PlanKind::kMasters], 4 * 1280);
  EXPECT_EQ(replicated[PlanKind::kGradients], (2 + 4) * 1280);
  EXPECT_EQ(replicated[PlanKind::kOptimizer], 8 * 1280);
  const PlannedBytes sharded = ModelStateBytes(At(3, 4, Bf16()), {});
  EXPECT_EQ(sharded[PlanKind::kParameters], 2 * 320);
  EXPECT_EQ(sharded[PlanKind::kMasters], 4 * 320);
  EXPECT_EQ(sharded[PlanKind::kGathered], 3 * 2 * 768);
  EXPECT_EQ(sharded[PlanKind::kGradients], 4 * 320 + 2 * 2 * 768);
  EXPECT_EQ(sharded[PlanKind::kOptimizer], 8 * 320);
}

TEST(ModelStateBytes, WhatLiesElsewhereCostsTheBuffersThatItStreamsThrough) {
  std::vector<PlannedFlat> flats = Bf16();
  for (PlannedFlat& f : flats) f.states = f.gradients = Tier::kDisk;
  PlannedFlats planned = At(3, 4, flats);
  planned.stream_bytes = 1000;
  const PlannedBytes bytes = ModelStateBytes(planned, {});
  EXPECT_EQ(bytes[PlanKind::kParameters], 2 * 320);
  EXPECT_EQ(bytes[PlanKind::kMasters], 0);
  EXPECT_EQ(bytes[PlanKind::kGradients], 2 * 2 * 768);
  EXPECT_EQ(bytes[PlanKind::kOptimizer], 1000);
}

TEST(MaxLiveWithin, IsWhatTheStatesLeave) {
  const auto most = [](const std::vector<PlannedFlat>& flats, int64_t more,
                       int64_t kept = 0) {
    const PlannedFlats planned = At(3, 4, flats);
    const int64_t all = ModelStateBytes(planned, {}).total();
    return MaxLiveWithin(planned, {}, kept, all + more);
  };
  const std::vector<PlannedFlat> ten(10, Unit(256));
  EXPECT_EQ(most(ten, 0), 512);
  EXPECT_EQ(most(ten, 4 * 768), 1280);
  EXPECT_EQ(most(ten, 4 * 768, /*kept=*/4 * 256), 1024);
  EXPECT_EQ(most(ten, 4 * 2047), 2559);
  EXPECT_EQ(most(ten, 4 * 2048), std::numeric_limits<int64_t>::max());
  // Less than what computes needs would not train at all.
  EXPECT_EQ(most(ten, -4 * 256), 512);
  EXPECT_EQ(MaxLiveWithin(At(3, 4, Fp32()), {}, 0, 1), 1280);
  // The wider ones first: whichever are kept fit.
  std::vector<PlannedFlat> mixed(10, Unit(256, 2));
  mixed.push_back(Unit(128, 4));
  EXPECT_EQ(most(mixed, 2 * 512), 128 + 768);
  // What persists is never freed.
  EXPECT_EQ(MaxLiveWithin(At(2, 4, ten), {}, 0, 1),
            std::numeric_limits<int64_t>::max());
}

TEST(ModelStateBytes, AccumulationHoldsMoreGradients) {
  StateOptions options;
  options.accumulates = true;
  const auto more = [&](int stage) {
    const PlannedFlats planned = At(stage, 4, Fp32());
    return ModelStateBytes(planned, options)[PlanKind::kGradients] -
           ModelStateBytes(planned, {})[PlanKind::kGradients];
  };
  EXPECT_EQ(more(0), 4 * 1280);
  EXPECT_EQ(more(2), 4 * 320);
  options.accumulates_locally = true;
  EXPECT_EQ(more(3), 4 * 1280);
}

TEST(ModelStateBytes, StepsInBackwardKeepTheGradientsOfTwoUnits) {
  StateOptions options;
  options.uses_up = true;
  const auto gradients = [&](int stage, const std::vector<PlannedFlat>& flats) {
    return ModelStateBytes(At(stage, 4, flats), options)[PlanKind::kGradients];
  };
  EXPECT_EQ(gradients(0, Fp32()), 2 * 4 * 768);
  EXPECT_EQ(gradients(3, Fp32()), 2 * (4 * 768 + 4 * 192));
  EXPECT_EQ(gradients(1, Bf16()), 2 * (2 * 768 + 4 * 192));
}

TEST(ModelStateBytes, FrozenAndPersistentPartsCostLess) {
  std::vector<PlannedFlat> flats = Fp32();
  flats[0].trained = false;
  EXPECT_EQ(ModelStateBytes(At(0, 2, flats), {}).total(), 4 * 768 + 16 * 512);
  PlannedFlats planned = At(3, 2, Fp32());
  planned.flats[0].sharded_parameters = false;
  const PlannedBytes bytes = ModelStateBytes(planned, {});
  EXPECT_EQ(bytes[PlanKind::kParameters], 4 * 768 + 4 * 256);
  EXPECT_EQ(bytes[PlanKind::kGathered], 3 * 4 * 512);
}

TEST(ChooseStage, TakesTheLowestThatFits) {
  const std::vector<int64_t> bytes = {16000, 8080, 9000, 4000};
  const auto stage = [&](int64_t memory) {
    return ChooseStage(bytes, 100, memory).value().stage;
  };
  EXPECT_EQ(stage(16000), 0);
  EXPECT_EQ(stage(15999), 1);
  EXPECT_EQ(stage(8080), 1);
  EXPECT_EQ(stage(8079), 3);
  EXPECT_EQ(ChooseStage(bytes, 100, 100000).value().reason,
            "stage 0 (plain replication, DDP), the lowest that fits: model "
            "states on each of 100 ranks: stage 0 0.0 MiB, stage 1 0.0 MiB, "
            "stage 2 0.0 MiB, stage 3 0.0 MiB; memory: 0.1 MiB");
}

// Units that are small beside the model: each stage needs less than the one
// before.
TEST(ModelStateBytes, FallsWithEachStage) {
  const std::vector<PlannedFlat> flats(100, Unit(1024));
  int64_t last = std::numeric_limits<int64_t>::max();
  for (int stage = 0; stage <= 3; ++stage) {
    const int64_t bytes = ModelStateBytes(At(stage, 8, flats), {}).total();
    EXPECT_LT(bytes, last);
    last = bytes;
  }
}

TEST(ChooseStage, SaysWhatIsMissing) {
  EXPECT_THAT(ChooseStage({400, 300, 200, 101}, 4, 100),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("no stage fits")));
}

}  // namespace
}  // namespace tessera
