// The equivalence matrix of shard groups: whatever the groups, the bits are the
// oracle's, on all replicas.
//
//   groups {2 of 2, 4 of 1, one of 4 with hpZ over 2} x stage {1, 2, 3}
//   x dtype {fp32, bf16, fp16} x accumulation {1, 3, 3 on each rank}
//   x overlap {on, off} x clipping {off, on}
//   x reshard_after_forward {true, false}, or gathers that are no collectives
//   x buckets {of a unit, of several}
//
// 18 cells in which every pair of values occurs, and two groups of two at stage
// 3 that gather by collectives; four ranks.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/support/pairwise.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

constexpr int kWorldSize = 4;
const Choice kAxes = {3, 3, 3, 3, 2, 2, 3, 2};
constexpr int kCells = 18;
const std::vector<std::string> kDtypes = {"fp32", "bf16", "fp16"};

// Clips where it matters: the norm of a Gpt is about 1.
constexpr double kClipping = 0.5;

bool OverSharedMemory() { return DefaultBackend() == "shm"; }

// "alone" means one working copy for a group, where ranks share memory, and
// else served shards. hpZ needs gathers, which one working copy does not have.
void SetGathers(size_t groups, size_t reshard, TrainingSpec* spec) {
  const bool hpz = groups == 2;
  spec->shared = spec->served = "off";
  if (reshard < 2) {
    if (!hpz) spec->reshard = reshard == 0 ? "true" : "false";
    if (hpz && reshard == 1) spec->reshard = "2";  // the same, said twice
  } else if (OverSharedMemory()) {
    spec->shared = "on";
  } else if (!hpz) {
    spec->served = "on";
  }
}

TrainingSpec SpecOf(const Choice& choice) {
  TrainingSpec spec;
  spec.model = "Gpt";
  spec.steps = 2;
  if (choice[0] < 2) spec.shard_group = choice[0] == 0 ? 2 : 1;
  if (choice[0] == 2) spec.hpz = 2;
  spec.stage = static_cast<int>(choice[1]) + 1;
  spec.dtype = kDtypes[choice[2]];
  spec.accumulation = choice[3] == 0 ? 1 : 3;
  if (choice[3] == 2) spec.accumulation_mode = "local";
  spec.overlap = choice[4] == 0;
  spec.clipping = choice[5] == 0 ? 0 : kClipping;
  SetGathers(choice[0], choice[6], &spec);
  if (spec.shard_group == 1) spec.shared = "off";  // nobody to share with
  spec.reduce_bucket_size = choice[7] == 0 ? 1 : 2000;
  spec.initial_scale_power = 12;
  spec.gradients = true;
  spec.outcomes = spec.clipping > 0 || spec.dtype != "fp32";
  spec.max_reuse_distance = 0;
  spec.poison = true;
  return spec;
}

// The parameter is the stage, so that a failure says where.
class GroupsTest : public ::testing::TestWithParam<int> {
 protected:
  GroupsTest() { spec_.stage = GetParam(); }
  TrainingSpec spec_;
};

TEST_P(GroupsTest, AreTheOracles) {
  static const std::vector<Choice> cells = [] {
    std::vector<Choice> all = Pairwise(kAxes, kCells);
    all.push_back({0, 2, 0, 0, 0, 0, 0, 0});
    all.push_back({0, 2, 1, 1, 1, 1, 0, 1});
    return all;
  }();
  int run = 0;
  for (const Choice& choice : cells) {
    const TrainingSpec spec = SpecOf(choice);
    if (spec.stage != GetParam()) continue;
    ExpectEqualsOracle(spec, kWorldSize);
    ++run;
    if (HasFailure()) return;  // one difference is enough to read
  }
  EXPECT_GE(run, kCells / 4);
}

// Ranks with graphs of their own, gradients that come late, and weights. At
// each stage a model has one of the modes, at the next one the other.
TEST_P(GroupsTest, RanksThatDiffer) {
  spec_.gradients = true;
  spec_.shard_group = 2;
  spec_.accumulation = 2;
  int cell = GetParam();
  for (const char* model :
       {"ChangingRank", "Recomputing", "SharedStorage", "Gpt"}) {
    spec_.model = model;
    spec_.weights = spec_.model == "Gpt";
    spec_.accumulation_mode = cell++ % 2 == 0 ? "each" : "local";
    ExpectEqualsOracle(spec_, kWorldSize);
  }
}

TEST_P(GroupsTest, DtypesOfReductionsSumsAndPredivision) {
  spec_.model = "Gpt";
  spec_.gradients = true;
  spec_.shard_group = 2;
  int cell = GetParam();
  for (const char* dtype : {"fp32", "bf16"}) {
    for (const char* reduce : {"fp32", "bf16", "fp16"}) {
      // Half of the pairs, and at the next stage the other half. Over other
      // backends, which run one stage, all of them.
      if (OverSharedMemory() && ++cell % 2 == 0) continue;
      spec_.dtype = dtype;
      spec_.reduce_dtype = reduce;
      ExpectEqualsOracle(spec_, kWorldSize);
    }
  }
  spec_.predivide = 3;
  ExpectEqualsOracle(spec_, kWorldSize);
  spec_.predivide = 1;
  spec_.reduction = "sum";
  ExpectEqualsOracle(spec_, kWorldSize);
}

// A step with an overflow on one rank is skipped by all groups.
TEST_P(GroupsTest, OverflowsAndWrites) {
  spec_.shard_group = 2;
  spec_.model = "Overflows";
  spec_.steps = 9;
  spec_.outcomes = true;
  spec_.dtype = "fp16";
  spec_.initial_scale_power = 8;
  spec_.loss_scale_window = 2;
  spec_.hysteresis = 1;
  ExpectEqualsOracle(spec_, kWorldSize);
  spec_.model = "Clamped";
  spec_.steps = 5;
  spec_.dtype = "bf16";
  ExpectEqualsOracle(spec_, kWorldSize);
}

TEST_P(GroupsTest, SmallParametersPersist) {
  spec_.shard_group = 2;
  spec_.model = "Gpt";
  spec_.gradients = true;
  for (int64_t threshold : {100, 100000}) {
    spec_.param_persistence_threshold = threshold;
    ExpectEqualsOracle(spec_, kWorldSize);
  }
}

// Construction is sharded over all ranks, and handed over to the groups.
TEST_P(GroupsTest, OfAModuleThatWasConstructedSharded) {
  spec_.shard_group = 2;
  spec_.model = "Gpt";
  spec_.construct_budget = 1 << 14;
  for (const char* dtype : {"fp32", "bf16"}) {
    spec_.dtype = dtype;
    ExpectEqualsOracle(spec_, kWorldSize);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GroupsTest, ::testing::Values(1, 2, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

// Nothing is sharded: all ranks are one group.
TEST(GroupsAtStage0, MeanNothing) {
  TrainingSpec spec;
  spec.model = "Gpt";
  spec.gradients = true;
  spec.shard_group = 2;
  ExpectEqualsOracle(spec, kWorldSize);
}

// Second shards within shard groups: two groups of four, parameters over pairs
// between forward and backward.
TEST(GroupsOfEight, HaveSecondShards) {
  TrainingSpec spec;
  spec.model = "Gpt";
  spec.stage = 3;
  spec.steps = 2;
  spec.gradients = true;
  spec.shard_group = 4;
  spec.hpz = 2;
  spec.shared = spec.served = "off";
  spec.max_reuse_distance = 0;
  spec.poison = true;
  ExpectEqualsOracle(spec, 8);
}

}  // namespace
}  // namespace tessera
