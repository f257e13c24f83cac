#include "engine/build/stage_choice.h"

#include <limits>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

// 1000 elements in units of 600 and 400.
std::vector<FlatSize> Fp32() { return {{600}, {400}}; }
std::vector<FlatSize> Bf16() {
  std::vector<FlatSize> flats = Fp32();
  for (FlatSize& f : flats) {
    f.working_bytes = f.reduce_bytes = 2;
    f.master_bytes = 4;
    f.keeps_sums = false;
  }
  return flats;
}

TEST(ModelStateBytes, Float32) {
  const auto total = [](int stage, int world_size) {
    return ModelStateBytes(Fp32(), stage, world_size, {}).total();
  };
  EXPECT_EQ(total(0, 4), 16 * 1000);
  EXPECT_EQ(total(1, 4), 8 * 1000 + 8 * 250);
  EXPECT_EQ(total(2, 4), 4 * 1000 + 12 * 250 + 2 * 4 * 600);
  EXPECT_EQ(total(3, 4), 16 * 250 + 5 * 4 * 600);
}

// ZeRO's figures: 2 + 2 + 12 bytes of an element, of which here the gradient
// that the optimizer reads is of float32 too.
TEST(ModelStateBytes, BFloat16) {
  const StageBytes replicated = ModelStateBytes(Bf16(), 0, 4, {});
  EXPECT_EQ(replicated.parameters, (2 + 4) * 1000);
  EXPECT_EQ(replicated.gradients, (2 + 4) * 1000);
  EXPECT_EQ(replicated.optimizer, 8 * 1000);
  const StageBytes sharded = ModelStateBytes(Bf16(), 3, 4, {});
  EXPECT_EQ(sharded.parameters, (2 + 4) * 250 + 3 * 2 * 600);
  EXPECT_EQ(sharded.gradients, 4 * 250 + 2 * 2 * 600);
  EXPECT_EQ(sharded.optimizer, 8 * 250);
}

TEST(MaxLiveWithin, IsWhatTheStatesLeave) {
  const auto most = [](const std::vector<FlatSize>& flats, int64_t more,
                       int64_t kept = 0) {
    const int64_t all = ModelStateBytes(flats, 3, 4, {}).total();
    return MaxLiveWithin(flats, 4, {}, kept, all + more);
  };
  const std::vector<FlatSize> ten(10, FlatSize{100});
  EXPECT_EQ(most(ten, 0), 200);
  EXPECT_EQ(most(ten, 4 * 300), 500);
  EXPECT_EQ(most(ten, 4 * 300, /*kept=*/4 * 100), 400);
  EXPECT_EQ(most(ten, 4 * 799), 999);
  EXPECT_EQ(most(ten, 4 * 800), std::numeric_limits<int64_t>::max());
  // Less than what computes needs would not train at all.
  EXPECT_EQ(most(ten, -4 * 100), 200);
  EXPECT_EQ(MaxLiveWithin(Fp32(), 4, {}, 0, 1), 1000);
  // The wider ones first: whichever are kept fit.
  std::vector<FlatSize> mixed(10, FlatSize{100, 2});
  mixed.push_back({50, 4});
  EXPECT_EQ(most(mixed, 2 * 200), 50 + 300);
  // What persists is never freed.
  std::vector<FlatSize> persistent(10, FlatSize{100});
  for (FlatSize& f : persistent) f.persistent = true;
  EXPECT_EQ(most(persistent, -100), std::numeric_limits<int64_t>::max());
}

TEST(ModelStateBytes, AccumulationHoldsMoreGradients) {
  StateOptions options;
  options.accumulates = true;
  const auto more = [&](int stage) {
    return ModelStateBytes(Fp32(), stage, 4, options).gradients -
           ModelStateBytes(Fp32(), stage, 4, {}).gradients;
  };
  EXPECT_EQ(more(0), 4 * 1000);
  EXPECT_EQ(more(2), 4 * 250);
  options.accumulates_locally = true;
  EXPECT_EQ(more(3), 4 * 1000);
}

TEST(ModelStateBytes, FrozenAndPersistentPartsCostLess) {
  std::vector<FlatSize> flats = Fp32();
  flats[0].trainable = false;
  EXPECT_EQ(ModelStateBytes(flats, 0, 2, {}).total(), 4 * 600 + 16 * 400);
  flats = Fp32();
  flats[0].persistent = true;
  EXPECT_EQ(ModelStateBytes(flats, 3, 2, {}).parameters,
            4 * 600 + 4 * 200 + 3 * 4 * 400);
}

TEST(ChooseStage, TakesTheLowestThatFits) {
  const auto stage = [](int64_t memory) {
    return ChooseStage(Fp32(), 100, {}, memory).value().stage;
  };
  EXPECT_EQ(stage(16000), 0);
  EXPECT_EQ(stage(15999), 1);
  EXPECT_EQ(stage(8 * 1000 + 8 * 10), 1);
  EXPECT_EQ(ChooseStage(Fp32(), 100, {}, 100000).value().reason,
            "stage 0 (plain replication, DDP), the lowest that fits: model "
            "states on each of 100 ranks: stage 0 0.0 MiB, stage 1 0.0 MiB, "
            "stage 2 0.0 MiB, stage 3 0.0 MiB; memory: 0.1 MiB");
}

// Units that are small beside the model: each stage needs less than the one
// before.
TEST(ChooseStage, GoesUpWithTheModel) {
  const std::vector<FlatSize> flats(100, FlatSize{1000});
  int last = 0;
  for (int stage = 0; stage <= 3; ++stage) {
    const int64_t bytes = ModelStateBytes(flats, stage, 8, {}).total();
    EXPECT_EQ(ChooseStage(flats, 8, {}, bytes).value().stage, stage);
    if (stage > 0) EXPECT_LT(bytes, last);
    last = static_cast<int>(bytes);
  }
}

TEST(ChooseStage, SaysWhatIsMissing) {
  EXPECT_THAT(ChooseStage(Fp32(), 4, {}, 100),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("no stage fits")));
}

}  // namespace
}  // namespace tessera
