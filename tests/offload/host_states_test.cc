// Optimizer states, gradients and parameters in the host's memory, or states
// and parameters on a disk, while the module is on a device: whatever the way,
// the bits are the oracle's, which knows of none, and everything that the
// device does comes in order (testing/device/test_device.h).
//
//   W {1, 2} x stage {1, 2, 3} x dtype {fp32, bf16, fp16}
//   x accumulation {1, 3} x clipping {off, on} x ratio {0, 0.3, 1}
//   x recompute {off, on} x shard groups {one, of one} x kernel {Tessera's,
//   libtorch's} x parameters {on the device, on the host, on a disk, there and
//   on the host} x work {at once, later}
//   x what persists {nothing, small units} x states {on the host, on a disk}
//   x gradients in {fp32, bf16} x masters {fp32, of parameters' 16 bits}
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"
#include "tests/support/at_start.h"
#include "tests/support/pairwise.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

// The device is registered before the first backward of a process.
[[maybe_unused]] const bool kRegistered =
    RunAtStart([] { testdevice::Register({}); });

const std::vector<int> kStages = {3, 3, 2, 1};
const std::vector<std::string> kDtypes = {"fp32", "bf16", "fp16"};
const std::vector<double> kRatios = {1, 1, 0.3, 0};
const Choice kAxes = {2, 4, 3, 2, 2, 4, 2, 2, 2, 4, 2, 2, 2, 2, 2};

struct Cell {
  int world_size = 1;
  TrainingSpec spec;
};

Cell CellOf(const Choice& choice) {
  Cell cell;
  cell.world_size = choice[0] + 1;
  TrainingSpec& spec = cell.spec;
  spec.model = "Gpt";
  spec.steps = 3;
  spec.stage = kStages[choice[1]];
  spec.tier = choice[12] == 1 && spec.stage == 3 ? "nvme" : "cpu";
  spec.dtype = kDtypes[choice[2]];
  spec.accumulation = choice[3] == 0 ? 1 : 3;
  spec.clipping = choice[4] == 0 ? 0 : 0.5;
  spec.gradient_dtype = choice[13] == 0 ? "" : "bf16";
  spec.states_on_disk = kRatios[choice[5]];
  spec.recompute = choice[6] == 0 ? "" : "auto/full";
  if (choice[7] == 1 && cell.world_size == 2) spec.shard_group = 1;
  spec.narrow_masters = choice[14] == 1 && spec.dtype != "fp32";
  spec.libtorch_exact = choice[8] == 1 && !spec.narrow_masters;
  if (spec.stage == 3 && choice[9] > 0) {
    // Puts some or all parameters of a Gpt on the disk, the others on the host.
    spec.parameters_in_memory = choice[9] == 3 ? 2000 : 0;
    spec.parameters_tier = choice[9] == 1 ? "cpu" : "nvme";
  }
  spec.device = choice[10] == 0 ? "1" : "1/workers";
  if (choice[11] == 1) spec.param_persistence_threshold = 300;
  spec.initial_scale_power = 12;
  spec.outcomes = spec.clipping > 0 || spec.dtype != "fp32";
  spec.poison = true;
  return cell;
}

class HostStates : public ::testing::TestWithParam<int> {};

TEST_P(HostStates, HaveTheOraclesBits) {
  static const std::vector<Choice> cells = Pairwise(kAxes, 32);
  int run = 0;
  for (const Choice& choice : cells) {
    const Cell cell = CellOf(choice);
    if (cell.world_size != GetParam()) continue;
    ExpectEqualsOracle(cell.spec, cell.world_size);
    ++run;
    if (HasFailure()) return;  // one difference is enough to read
  }
  RecordProperty("cells", run);
  EXPECT_GT(run, 0);
}

INSTANTIATE_TEST_SUITE_P(All, HostStates, ::testing::Values(1, 2),
                         [](const auto& info) {
                           return absl::StrCat("World", info.param);
                         });

// Units that come and go, a shared storage, writes of the user's into
// parameters (to masters on the host), layers that are not used, steps that are
// skipped.
TEST(HostStatesModels, HaveTheOraclesBits) {
  int models = 0;
  for (const char* model : {"Mlp", "SharedStorage", "Tied", "Frozen", "Clamped",
                            "ChangingRank", "Overflows"}) {
    // Every model and place has both dtypes; only float16 skips steps.
    int turn = models++;
    const bool skips = std::string(model) == "Overflows";
    for (const char* parameters : {"", "none", "cpu", "nvme"}) {
      TrainingSpec spec;
      spec.device = "1/workers";
      spec.tier = "cpu";
      spec.model = model;
      spec.steps = 5;
      spec.stage = *parameters == '\0' ? 2 : 3;
      spec.dtype = turn++ % 2 == 0 && !skips ? "fp32" : "fp16";
      spec.states_on_disk = 1;
      if (spec.stage == 3) spec.parameters_in_memory = 0;
      spec.parameters_tier = parameters;
      spec.outcomes = spec.dtype != "fp32";
      spec.initial_scale_power = 8;
      ExpectEqualsOracle(spec, 2);
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace tessera
