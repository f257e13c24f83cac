// Training on a device, as a device without hardware sees it
// (testing/device/test_device.h): device 1 of 2, while 0 is the current one.
// The bits are the oracle's, which trains on the CPU, and no access is out of
// order: neither as streams are launched, nor with threads that run them late.
//
//   W {1, 2, 3} x stage {0, 1, 2, 3} x dtype {fp32, bf16, fp16}
//   x accumulation {1, 3} x overlap {on, off} x clipping {off, on}
//   x reshard_after_forward {true, false, a smaller group}
//   x {at once, with threads, at once with collectives on the host}
//
// 33 cells in which every pair of values occurs. Most of the other tests run
// half of their cells at once and the other half with threads.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/pairwise.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::vector<std::string> kDtypes = {"fp32", "bf16", "fp16"};
const std::vector<std::string> kReshard = {"true", "false", "2"};
const std::vector<std::string> kDevices = {"1", "1/workers", "1/host"};
const Choice kAxes = {3, 4, 3, 2, 2, 2, 3, 3};

TrainingSpec SpecOf(const Choice& choice) {
  const int world_size = static_cast<int>(choice[0]) + 1;
  TrainingSpec spec;
  spec.model = "Gpt";
  spec.steps = 2;
  spec.stage = static_cast<int>(choice[1]);
  spec.dtype = kDtypes[choice[2]];
  spec.accumulation = choice[3] == 0 ? 1 : 3;
  spec.overlap = choice[4] == 0;
  spec.clipping = choice[5] == 0 ? 0 : 0.5;
  spec.reshard = kReshard[choice[6]];
  if (world_size % 2 != 0 && spec.reshard == "2") spec.reshard = "true";
  spec.device = kDevices[choice[7]];
  spec.initial_scale_power = 12;
  spec.gradients = true;
  spec.outcomes = spec.clipping > 0 || spec.dtype != "fp32";
  spec.max_reuse_distance = 0;
  spec.reduce_bucket_size = 2000;
  return spec;
}

class DeviceMatrixTest : public ::testing::TestWithParam<std::tuple<int, int>> {
};

TEST_P(DeviceMatrixTest, IsTheOracles) {
  const auto [world_size, stage] = GetParam();
  static const std::vector<Choice> cells = Pairwise(kAxes, 33);
  int run = 0;
  for (const Choice& choice : cells) {
    if (static_cast<int>(choice[0]) + 1 != world_size) continue;
    const TrainingSpec spec = SpecOf(choice);
    if (spec.stage != stage) continue;
    ExpectEqualsOracle(spec, world_size);
    ++run;
    if (HasFailure()) return;
  }
  EXPECT_GT(run, 0);
}

INSTANTIATE_TEST_SUITE_P(All, DeviceMatrixTest,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(0, 1, 2, 3)),
                         [](const auto& info) {
                           return absl::StrCat("World", std::get<0>(info.param),
                                               "Stage",
                                               std::get<1>(info.param));
                         });

class DeviceTest : public ::testing::TestWithParam<std::string> {
 protected:
  DeviceTest() {
    spec_.device = GetParam();
    spec_.gradients = true;
  }
  // Whether this device runs the cell whose values' indices add up to `sum`.
  bool Runs(int sum) const {
    return (sum + (GetParam() == "1" ? 0 : 1)) % 2 == 0;
  }
  TrainingSpec spec_;
};

INSTANTIATE_TEST_SUITE_P(All, DeviceTest, ::testing::Values("1", "1/workers"),
                         [](const auto& info) {
                           return info.param == "1" ? "AtOnce" : "Workers";
                         });

TEST_P(DeviceTest, ModelsOfAllKinds) {
  // These exclude models whose gradients autograd adds up in another order on
  // devices, and those for which torch uses other operators there: its
  // recurrent cells, group norm of channels_last.
  int cell = 0;
  for (const char* model :
       {"Mlp", "Resnet", "Attention", "Views", "SharedStorage", "Frozen",
        "UsedTwice", "Tied", "Clamped", "TwoForwards", "Checkpointing"}) {
    spec_.model = model;
    spec_.stage = Runs(cell++) ? 0 : 3;
    ExpectEqualsOracle(spec_, 2);
  }
}

TEST_P(DeviceTest, RemaindersOfMasters) {
  spec_.model = "Gpt";
  spec_.dtype = "bf16";
  spec_.remainder_masters = true;
  for (const int stage : {0, 1, 2, 3}) {
    spec_.stage = stage;
    spec_.clipping = stage % 2 == 0 ? 0 : 0.5;
    spec_.accumulation = stage < 2 ? 2 : 1;
    ExpectEqualsOracle(spec_, Runs(stage) ? 1 : 2);
  }
  spec_.libtorch_exact = true;  // by operators, on joined masters
  ExpectEqualsOracle(spec_, 2);
}

TEST_P(DeviceTest, StepsInBackward) {
  spec_.gradients = false;  // they are gone
  spec_.more = "sharding{step_in_backward:true,max_unit_numel:500}";
  spec_.reduce_bucket_size = 1;
  spec_.check_overflow = false;
  for (const int stage : {0, 1, 2, 3}) {
    spec_.stage = stage;
    spec_.dtype = stage % 2 == 0 ? "fp32" : "bf16";
    spec_.clipping_value = stage < 2 ? 0.002 : 0;
    ExpectEqualsOracle(spec_, Runs(stage) ? 1 : 2);
  }
}

TEST_P(DeviceTest, ShardGroups) {
  spec_.model = "Gpt";
  spec_.shard_group = 2;
  for (int stage : {1, 2, 3}) {
    spec_.stage = stage;
    ExpectEqualsOracle(spec_, 4);
  }
}

// One rank gathers its own parameters (sharding.shard_alone).
TEST_P(DeviceTest, AShardOfOne) {
  spec_.model = "Gpt";
  spec_.stage = 3;
  spec_.more = "sharding{shard_alone:true}";
  for (const char* dtype : {"fp32", "bf16"}) {
    spec_.dtype = dtype;
    spec_.clipping = 0.5 - spec_.clipping;
    for (const int64_t live : {int64_t{0}, int64_t{-1}}) {
      spec_.max_live_parameters = live;
      ExpectEqualsOracle(spec_, 1);
    }
  }
}

TEST_P(DeviceTest, GroupsOfNeighbours) {
  spec_.model = "Gpt";
  spec_.stage = 3;
  spec_.hpz = 2;
  ExpectEqualsOracle(spec_, 2);
}

// The host finds the units' norms, also with states on the host.
TEST_P(DeviceTest, ClippingOfUnits) {
  spec_.dtype = "fp16";
  spec_.adaptive = 0.02;
  spec_.tier = "cpu";
  for (int stage : {0, 3}) {
    spec_.stage = stage;
    ExpectEqualsOracle(spec_, 2);
  }
  spec_.states_on_disk = 1;
  ExpectEqualsOracle(spec_, 2);
}

// Clips by value, and biases by a norm of their own, also with states on the
// host.
TEST_P(DeviceTest, ClippingOfValuesAndGroups) {
  const std::string groups =
      absl::StrCat(spec_.optimizer,
                   ",param_groups{parameters:'*.bias',gradient_clipping:0.01}");
  spec_.dtype = "fp16";
  spec_.clipping = 0.1;
  spec_.tier = "cpu";
  for (int stage : {0, 1, 3}) {
    spec_.stage = stage;
    for (const bool grouped : {false, true}) {
      spec_.optimizer = grouped ? groups : TrainingSpec().optimizer;
      spec_.clipping_value = grouped ? 0 : 0.01;
      const bool offloads = stage > 0 && Runs(stage / 2 + (grouped ? 1 : 0));
      spec_.states_on_disk = offloads ? 1 : -1;
      ExpectEqualsOracle(spec_, 2);
    }
  }
}

// Shards cut rows and columns; fp16 skips the first steps.
TEST_P(DeviceTest, Adafactor) {
  spec_.model = "Gpt";
  spec_.optimizer = "type:'Adafactor',params{weight_decay:0.1}";
  spec_.initial_scale_power = 24;
  spec_.gradients = false;  // NaNs of several kinds
  spec_.outcomes = true;
  spec_.steps = 6;
  spec_.clipping = 0.5;
  for (const bool half : {false, true}) {
    spec_.dtype = half ? "fp16" : "fp32";
    spec_.stage = Runs(half ? 1 : 0) ? 3 : 0;
    ExpectEqualsOracle(spec_, 2);
  }
}

// It runs operator by operator; a skipped step is undone.
TEST_P(DeviceTest, LibtorchExact) {
  spec_.libtorch_exact = true;
  spec_.steps = 2;
  spec_.model = "Gpt";
  spec_.clipping = 0.5;
  for (const bool half : {false, true}) {
    spec_.dtype = half ? "bf16" : "fp32";
    spec_.stage = Runs(half ? 1 : 0) ? 3 : 0;
    ExpectEqualsOracle(spec_, 2);
  }
}

// fp16's scale goes down and up again. Ranks that ask for each step's outcome
// (outcomes) know the scale of the next loss; the others leave it to the
// device.
class DeviceOverflowTest : public DeviceTest {
 protected:
  DeviceOverflowTest() {
    spec_.model = "Overflows";
    spec_.dtype = "fp16";
    spec_.steps = 9;
    spec_.initial_scale_power = 8;
    spec_.loss_scale_window = 2;
    spec_.hysteresis = 1;
    spec_.gradients = false;  // NaNs of those that overflow have any sign
  }
  void ExpectOraclesWhetherAskedOrNot(int world_size) {
    for (const bool asks : {true, false}) {
      spec_.outcomes = asks;
      ExpectEqualsOracle(spec_, world_size);
    }
  }
};

INSTANTIATE_TEST_SUITE_P(All, DeviceOverflowTest,
                         ::testing::Values("1", "1/workers"),
                         [](const auto& info) {
                           return info.param == "1" ? "AtOnce" : "Workers";
                         });

TEST_P(DeviceOverflowTest, Stages) {
  for (int stage : {0, 1, 2, 3}) {
    spec_.stage = stage;
    ExpectOraclesWhetherAskedOrNot(2);
  }
}

TEST_P(DeviceOverflowTest, HysteresisClippingAndAStaticScale) {
  spec_.stage = 3;
  spec_.hysteresis = 2;
  spec_.clipping = 0.5;
  ExpectOraclesWhetherAskedOrNot(2);
  spec_.clipping = 0;
  spec_.loss_scale = 24;
  ExpectOraclesWhetherAskedOrNot(3);
}

TEST_P(DeviceOverflowTest, AccumulationAndWeights) {
  spec_.accumulation = 3;
  for (const bool weights : {false, true}) {
    spec_.weights = weights;
    ExpectOraclesWhetherAskedOrNot(2);
  }
}

// A skipped step has no weight in the average.
TEST_P(DeviceOverflowTest, ScheduleFree) {
  spec_.optimizer = "type:'AdamWScheduleFree',params{weight_decay:0.1,r:1}";
  for (int stage : {1, 3}) {
    spec_.stage = stage;
    ExpectOraclesWhetherAskedOrNot(2);
  }
}

TEST_P(DeviceOverflowTest, LibtorchExact) {
  spec_.libtorch_exact = true;
  ExpectOraclesWhetherAskedOrNot(2);
}

// Each rank has a path of its own through the model.
class DevicePathsTest : public DeviceTest {
 protected:
  DevicePathsTest() {
    spec_.model = "Wandering";
    spec_.stage = 3;
    spec_.steps = 6;
    spec_.gradients = false;
    spec_.max_reuse_distance = 0;
    spec_.prefetch_bucket_size = 1;  // the next unit
  }
};

INSTANTIATE_TEST_SUITE_P(All, DevicePathsTest,
                         ::testing::Values("1", "1/workers"),
                         [](const auto& info) {
                           return info.param == "1" ? "AtOnce" : "Workers";
                         });

TEST_P(DevicePathsTest, ServedGathersHaveTheBits) {
  spec_.served = "on";
  for (const int world_size : {2, 3}) {
    spec_.dtype = Runs(world_size) ? "fp32" : "bf16";
    ExpectEqualsOracle(spec_, world_size);
  }
}

// The first ranks to part are in gathers of one size.
TEST_P(DevicePathsTest, CollectiveGathersEndWithAnErrorThatNamesBoth) {
  spec_.served = "off";
  RankPool pool({});  // its ranks have failed afterwards
  for (const auto& answer : pool.Run("Train", spec_.ToText())) {
    EXPECT_THAT(
        answer.status().ToString(),
        AllOf(HasSubstr("the ranks are in different collectives: "),
              HasSubstr("all-gather of unit blocks.0 "),
              HasSubstr("all-gather of unit blocks.2 "), HasSubstr(", rank ")));
  }
}

TEST_P(DeviceTest, Recomputation) {
  spec_.model = "Gpt";
  for (const bool all : {false, true}) {
    spec_.recompute = all ? "auto/full" : "auto/selective";
    spec_.stage = Runs(all ? 1 : 0) ? 3 : 0;
    ExpectEqualsOracle(spec_, 2);
  }
}

}  // namespace
}  // namespace tessera
