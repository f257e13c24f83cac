// Optimizer states, and parameters, on a disk: whatever the way, the bits are
// the oracle's, which knows of no disk.
//
//   W {1, 2, 4} x stage {1, 2, 3} x dtype {fp32, bf16, fp16}
//   x accumulation {1, 3} x clipping {off, on} x ratio {0, 0.3, 1}
//   x recompute {off, on} x gathers {all-gathers, none, served}
//   x shard groups {one, of two} x kernel {Tessera's, libtorch's}
//   x parameters on the disk {none, some, all} x gradients there {no, yes}
//   x gradients in {fp32, bf16} x masters {fp32, of parameters' 16 bits}
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/support/pairwise.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

const std::vector<int> kWorldSizes = {1, 2, 4};
// Below stage 3 nvme counts as cpu.
const std::vector<int> kStages = {3, 3, 3, 3, 2, 1};
const std::vector<std::string> kDtypes = {"fp32", "bf16", "fp16"};
const std::vector<double> kRatios = {0, 0.3, 1, 1};
const std::vector<int64_t> kInMemory = {-1, 3000, 0};
const Choice kAxes = {3, 6, 3, 2, 2, 4, 2, 3, 2, 2, 3, 2, 2, 2};

struct Cell {
  int world_size = 1;
  TrainingSpec spec;
};

Cell CellOf(const Choice& choice) {
  Cell cell;
  cell.world_size = kWorldSizes[choice[0]];
  TrainingSpec& spec = cell.spec;
  spec.model = "Gpt";
  spec.steps = 3;
  spec.stage = kStages[choice[1]];
  spec.dtype = kDtypes[choice[2]];
  spec.accumulation = choice[3] == 0 ? 1 : 3;
  spec.clipping = choice[4] == 0 ? 0 : 0.5;
  spec.states_on_disk = kRatios[choice[5]];
  spec.recompute = choice[6] == 0 ? "" : "auto/full";
  spec.parameters_in_memory = kInMemory[choice[10]];
  spec.gradients_on_disk = choice[11] == 1;
  spec.gradient_dtype = choice[12] == 0 ? "" : "bf16";
  const bool shm = DefaultBackend() == "shm";
  const bool in_memory = spec.parameters_in_memory < 0;
  spec.shared = choice[7] == 1 && shm && in_memory ? "on" : "off";
  spec.served = choice[7] == 2 && in_memory ? "on" : "off";
  if (choice[8] == 1 && cell.world_size == 4) spec.shard_group = 2;
  spec.narrow_masters = choice[13] == 1 && spec.dtype != "fp32";
  spec.libtorch_exact = choice[9] == 1 && !spec.narrow_masters;
  spec.initial_scale_power = 12;
  spec.outcomes = spec.clipping > 0 || spec.dtype != "fp32";
  spec.poison = true;
  return cell;
}

class StatesOnDisk : public ::testing::TestWithParam<int> {};

TEST_P(StatesOnDisk, HaveTheOraclesBits) {
  static const std::vector<Choice> cells = Pairwise(kAxes, 44);
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

INSTANTIATE_TEST_SUITE_P(All, StatesOnDisk, ::testing::Values(1, 2, 4),
                         [](const auto& info) {
                           return absl::StrCat("World", info.param);
                         });

// Units that come and go, a shared storage, writes of the user's into
// parameters (to masters on the disk), layers that are not used, steps that
// are skipped.
TEST(StatesOnDiskModels, HaveTheOraclesBits) {
  for (const char* model : {"Mlp", "SharedStorage", "Tied", "Frozen", "Clamped",
                            "ChangingRank", "Overflows"}) {
    for (const char* dtype : {"fp32", "bf16", "fp16"}) {
      TrainingSpec spec;
      spec.parameters_in_memory = 0;
      spec.gradients_on_disk = std::string(model) != "Mlp";
      spec.model = model;
      spec.steps = 5;
      spec.stage = 3;
      spec.dtype = dtype;
      spec.states_on_disk = 1;
      spec.outcomes = spec.dtype != "fp32";
      spec.initial_scale_power = 8;
      ExpectEqualsOracle(spec, 2);
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace tessera
