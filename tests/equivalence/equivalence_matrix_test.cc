// Tests the equivalence matrix: the bits of every way are the oracle's, for
// losses at each step on each rank, gradients, norms, scales, parameters and
// generators.
//
//   W {1, 2, 3, 4} x stage {0, 1, 2, 3} x dtype {fp32, bf16, fp16}
//   x accumulation {1, 3} x overlap {on, off} x clipping {off, on}
//   x reshard_after_forward {true, false, a smaller group}, or gathers that are
//   no collectives
//
// 36 cells in which every pair of values occurs (20 over other backends than
// shared memory), and 16 of stage 3; all 1,536 in
// :equivalence_matrix_test_slow. One set of ranks per W serves all its cells.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "gtest/gtest.h"
#include "tests/support/pairwise.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

struct Cell {
  int world_size = 1;
  TrainingSpec spec;
};

// Axes in the order of the header, and what their values change.
const std::vector<std::string> kDtypes = {"fp32", "bf16", "fp16"};
// "alone" means that no rank waits for another in a gather: there is one
// working copy for all ranks where they share memory, and else served shards.
const std::vector<std::string> kReshard = {"true", "false", "group", "alone"};
const Choice kAxes = {4, 4, 3, 2, 2, 2, 4};

// Clips where it matters: the norm of a Gpt is about 1.
constexpr double kClipping = 0.5;

bool OverSharedMemory() { return DefaultBackend() == "shm"; }

Cell CellOf(const Choice& choice) {
  Cell cell;
  cell.world_size = static_cast<int>(choice[0]) + 1;
  TrainingSpec& spec = cell.spec;
  spec.model = "Gpt";
  spec.steps = 2;
  spec.stage = static_cast<int>(choice[1]);
  spec.dtype = kDtypes[choice[2]];
  spec.accumulation = choice[3] == 0 ? 1 : 3;
  spec.overlap = choice[4] == 0;
  spec.clipping = choice[5] == 0 ? 0 : kClipping;
  spec.reshard = kReshard[choice[6]];
  if (spec.reshard == "group") {
    const bool divides = cell.world_size % 2 == 0;
    spec.reshard = divides ? "2" : "true";
  }
  spec.shared = spec.served = "off";
  if (spec.reshard == "alone") {
    spec.reshard = "true";
    (OverSharedMemory() ? spec.shared : spec.served) = "on";
  }
  spec.initial_scale_power = 12;
  spec.gradients = true;
  spec.outcomes = spec.clipping > 0 || spec.dtype != "fp32";
  // Units come and go, some in small buckets.
  spec.max_reuse_distance = 0;
  spec.reduce_bucket_size = 2000;
  spec.poison = cell.world_size > 1;  // a rank alone frees nothing without
  return cell;
}

bool AllCells() { return EnvString("TESSERA_TEST_CELLS") == "all"; }

std::vector<Choice> Cells() {
  if (AllCells()) return AllChoices(kAxes);
  // Other backends are at stake in collectives, of which all cells have many.
  if (!OverSharedMemory()) return Pairwise(kAxes, 20);
  std::vector<Choice> cells = Pairwise(kAxes, 36);
  // How units are gathered is of account at stage 3 alone.
  const size_t stage = 3;
  for (const Choice& c : Pairwise({4, 3, 2, 4}, 16)) {
    const size_t turn = (c[0] + c[1]) % 2;
    cells.push_back({c[0], stage, c[1], c[2], turn, (c[3] + turn) % 2, c[3]});
  }
  return cells;
}

// The parameters are world size and stage: each has its own test, so that a
// failure says where.
class MatrixTest : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(MatrixTest, IsTheOracles) {
  const auto [world_size, stage] = GetParam();
  static const std::vector<Choice> cells = Cells();
  int run = 0;
  for (const Choice& choice : cells) {
    const Cell cell = CellOf(choice);
    if (cell.world_size != world_size || cell.spec.stage != stage) continue;
    ExpectEqualsOracle(cell.spec, world_size);
    ++run;
    if (HasFailure()) return;  // one difference is enough to read
  }
  RecordProperty("cells", run);
  EXPECT_GT(run, 0);
}

INSTANTIATE_TEST_SUITE_P(All, MatrixTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(0, 1, 2, 3)),
                         [](const auto& info) {
                           return absl::StrCat("World", std::get<0>(info.param),
                                               "Stage",
                                               std::get<1>(info.param));
                         });

// ---- more of one axis, at every stage

class MoreTest : public ::testing::TestWithParam<int> {
 protected:
  MoreTest() { spec_.stage = GetParam(); }
  // Whether this stage runs a cell: one of `of` of a test's cells, each of
  // which is run at some stage. `sum` is of the indices of the cell's values.
  bool Runs(int sum, int of = 2) const {
    return AllCells() || (sum + GetParam()) % of == 0;
  }
  TrainingSpec spec_;
};
INSTANTIATE_TEST_SUITE_P(All, MoreTest, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

// The model has a layer that is never used: it is skipped and not decayed.
TEST_P(MoreTest, TwentySteps) {
  spec_.model = "Mlp";
  spec_.steps = 20;
  for (int world_size : {1, 2, 3, 4}) ExpectEqualsOracle(spec_, world_size);
}

TEST_P(MoreTest, MicroBatchesOfRanksThatDiffer) {
  spec_.model = "ChangingRank";
  spec_.steps = 4;
  spec_.accumulation = 3;
  spec_.gradients = true;
  for (int world_size : {2, 3}) ExpectEqualsOracle(spec_, world_size);
}

TEST_P(MoreTest, AddedUpOnEachRank) {
  spec_.accumulation = 3;
  spec_.accumulation_mode = "local";
  spec_.gradients = true;
  for (const char* model : {"Gpt", "ChangingRank", "SharedStorage"}) {
    spec_.model = model;
    for (const char* dtype : {"fp32", "bf16"}) {
      spec_.dtype = dtype;
      ExpectEqualsOracle(spec_, 2);
    }
  }
}

TEST_P(MoreTest, DtypesOfReductions) {
  spec_.model = "Gpt";
  spec_.gradients = true;
  spec_.accumulation = 2;
  const char* const dtypes[] = {"fp32", "bf16"};
  const char* const reduces[] = {"fp32", "bf16", "fp16"};
  const char* const modes[] = {"each", "local"};
  // Every pair of these occurs at each stage.
  for (int d = 0; d < 2; ++d) {
    for (int r = 0; r < 3; ++r) {
      for (int m = 0; m < 2; ++m) {
        if (!Runs(d + r + m)) continue;
        spec_.dtype = dtypes[d];
        spec_.reduce_dtype = reduces[r];
        spec_.accumulation_mode = modes[m];
        ExpectEqualsOracle(spec_, 3);
      }
    }
  }
}

// Steps' gradients in 16 bits, clipped in these by value, unit and group.
TEST_P(MoreTest, DtypesOfGradients) {
  spec_.model = "Gpt";
  spec_.gradients = true;
  spec_.accumulation = 3;
  spec_.clipping = 0.5;
  spec_.clipping_value = 0.01;
  spec_.adaptive = 0.05;
  spec_.optimizer =
      "type:'AdamW',params{lr:0.01},param_groups{name:'biases',parameters:"
      "'*.bias',gradient_clipping:0.05}";
  spec_.outcomes = true;
  const char* const dtypes[] = {"fp32", "bf16"};
  const char* const reduces[] = {"", "fp32"};
  const char* const gradients[] = {"bf16", "fp16"};
  const char* const modes[] = {"each", "local"};
  for (int i = 0; i < 16; ++i) {
    const int d = i % 2, r = i / 2 % 2, g = i / 4 % 2, m = i / 8;
    // A stage runs four cells, which have all of these values; all are run in
    // the slow test.
    if (!Runs(d + 2 * r + 3 * g + m, 4)) continue;
    spec_.dtype = dtypes[d];
    spec_.reduce_dtype = reduces[r];
    spec_.gradient_dtype = gradients[g];
    spec_.accumulation_mode = modes[m];
    ExpectEqualsOracle(spec_, 3);
  }
}

// A block is used in two reentrant checkpoints: its gradient comes in two
// parts, which are added up in the working dtype.
TEST_P(MoreTest, GradientsInParts) {
  spec_.model = "Recomputing";
  spec_.gradients = true;
  spec_.accumulation = 2;
  for (const char* dtype : {"fp32", "bf16"}) {
    for (const char* reduce : {"fp32", "bf16"}) {
      for (const char* mode : {"each", "local"}) {
        spec_.dtype = dtype;
        spec_.reduce_dtype = reduce;
        spec_.accumulation_mode = mode;
        ExpectEqualsOracle(spec_, 2);
      }
    }
  }
}

TEST_P(MoreTest, SumsAndPredivision) {
  spec_.model = "Mlp";
  spec_.gradients = true;
  spec_.predivide = 4;
  ExpectEqualsOracle(spec_, 3);
  spec_.predivide = 1;
  spec_.reduction = "sum";
  ExpectEqualsOracle(spec_, 3);
}

TEST_P(MoreTest, WeightsOfUnevenInput) {
  spec_.model = "Gpt";
  spec_.gradients = true;
  spec_.weights = true;
  spec_.clipping = kClipping;
  spec_.outcomes = true;
  for (int accumulation : {1, 3}) {
    spec_.accumulation = accumulation;
    for (const bool local : {false, true}) {
      spec_.accumulation_mode = local ? "local" : "each";
      for (int world_size : {2, 3}) {
        if (!Runs(accumulation / 2 + (local ? 1 : 0) + world_size)) continue;
        ExpectEqualsOracle(spec_, world_size);
      }
    }
  }
}

TEST_P(MoreTest, NormsOfClipping) {
  spec_.gradients = spec_.outcomes = true;
  spec_.steps = 4;
  int cell = 0;
  for (const char* model :
       {"LargeNorm", "Gpt", "SharedStorage", "Tied", "Frozen"}) {
    spec_.model = model;
    for (double p : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
      spec_.clipping_norm = p;
      spec_.clipping = kClipping;
      // One rank for every other pair of a model and a norm, three for the
      // rest.
      ++cell;
      if (Runs(cell)) ExpectEqualsOracle(spec_, 1);
      if (Runs(cell + 1)) ExpectEqualsOracle(spec_, 3);
    }
  }
}

// One rank overflows; the loss scale goes down and up again.
TEST_P(MoreTest, StepsThatOverflow) {
  spec_.model = "Overflows";
  spec_.steps = 9;
  spec_.outcomes = true;
  spec_.dtype = "fp16";
  spec_.initial_scale_power = 8;
  spec_.loss_scale_window = 2;
  spec_.hysteresis = 1;
  ExpectEqualsOracle(spec_, 2);
  spec_.loss_scale = 24;
  ExpectEqualsOracle(spec_, 3);
  spec_.dtype = "bf16";
  ExpectEqualsOracle(spec_, 2);
}

TEST_P(MoreTest, NormsStayInFloat32) {
  spec_.dtype = "bf16";
  spec_.fp32_norms = true;
  spec_.gradients = true;
  for (const char* model : {"Mlp", "Gpt", "ConvNorm"}) {
    spec_.model = model;
    ExpectEqualsOracle(spec_, 2);
  }
}

// Masters keep the bits that the working copy cannot hold.
TEST_P(MoreTest, WritesThatChangeNothing) {
  spec_.model = "Clamped";
  spec_.steps = 5;
  spec_.gradients = true;
  spec_.initial_scale_power = 8;
  for (const char* dtype : {"bf16", "fp16"}) {
    spec_.dtype = dtype;
    ExpectEqualsOracle(spec_, 2);
  }
}

TEST_P(MoreTest, SmallParametersPersist) {
  spec_.model = "Gpt";
  spec_.gradients = true;
  for (int64_t threshold : {10, 100, 100000}) {
    spec_.param_persistence_threshold = threshold;
    for (const char* dtype : {"fp32", "bf16"}) {
      spec_.dtype = dtype;
      ExpectEqualsOracle(spec_, 2);
    }
  }
}

}  // namespace
}  // namespace tessera
