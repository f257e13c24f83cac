// Compares the most memory that an engine holds at any moment of a step, by the
// counted source, with formulas: S is a rank's share of all units, B the
// largest unit. FSDP2 asserts S + 3B forward and 2S + 3B + R backward
// (parameters and gradients; optimizer states beside them).
#include <algorithm>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "tests/support/pairwise.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

constexpr int64_t kSlack = 1 << 20;
constexpr int kBlocks = 4;
constexpr int64_t kDim = 384, kVocabulary = 1024;

struct WideBlock : torch::nn::Module {
  WideBlock()
      : up(register_module("up", torch::nn::Linear(kDim, 4 * kDim))),
        down(register_module("down", torch::nn::Linear(4 * kDim, kDim))) {}
  torch::nn::Linear up, down;
};

// Something before the blocks and after them.
struct DeepModel : torch::nn::Module {
  DeepModel()
      : embedding(register_module("embedding",
                                  torch::nn::Embedding(kVocabulary, kDim))) {
    for (int i = 0; i < kBlocks; ++i) {
      blocks.push_back(register_module(absl::StrCat("block", i),
                                       std::make_shared<WideBlock>()));
    }
    head = register_module("head", torch::nn::Linear(kDim, 7));
  }
  at::Tensor Loss(int rank) {
    at::Tensor h = embedding(torch::arange(rank, rank + 3));
    for (auto& block : blocks) {
      h = h + block->down(torch::relu(block->up(h)));
    }
    return head(h).to(torch::kFloat).square().mean();
  }
  torch::nn::Embedding embedding;
  std::vector<std::shared_ptr<WideBlock>> blocks;
  torch::nn::Linear head{nullptr};
};

// Returns the elements of a unit's flat buffer, where parameters and shards lie
// at multiples of 64.
int64_t UnitNumel(const std::vector<int64_t>& parameters, int world_size) {
  const auto align = [](int64_t n) { return (n + 63) / 64 * 64; };
  int64_t end = 0;
  for (int64_t numel : parameters) end += align(numel);
  return align((end + world_size - 1) / world_size) * world_size;
}

struct ModelNumel {
  int64_t whole = 0, largest = 0;
};
ModelNumel NumelOf(int world_size) {
  const int64_t block =
      UnitNumel({4 * kDim * kDim, 4 * kDim, 4 * kDim * kDim, kDim}, world_size);
  const int64_t embedding = UnitNumel({kVocabulary * kDim}, world_size);
  return {embedding + kBlocks * block + UnitNumel({kDim * 7, 7}, world_size),
          std::max(embedding, block)};
}

// args: a TrainingSpec. For each step's forward, and for the rest of it, two
// figures: the peak of the total less what was held before the engine, and less
// the staging of collectives (Gloo's pieces of a few MiB, whatever the model);
// and the peak of gradients.
TESSERA_RANK_FUNCTION(PeaksOfSteps) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  at::set_num_threads(1);
  torch::manual_seed(1);
  MemoryLedger& ledger = MemoryLedger::Host();
  const MemoryReport start = ledger.Report();
  const int64_t before = start.total.current_bytes -
                         start[MemoryKind::kCommunication].current_bytes;
  auto model = std::make_shared<DeepModel>();
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, world.communicator()));
  std::string peaks;
  const auto note = [&] {
    const MemoryReport report = ledger.Report();
    absl::StrAppend(&peaks,
                    report.total.peak_bytes - before -
                        report[MemoryKind::kCommunication].peak_bytes,
                    " ", report[MemoryKind::kGradients].peak_bytes, " ");
    ledger.ResetPeak();
  };
  ledger.ResetPeak();
  for (int step = 0; step < spec.steps; ++step) {
    at::Tensor loss = model->Loss(world.rank());
    note();
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    note();
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return peaks;
}

// Returns all choices, or `part` of them, in which every pair of values occurs.
// Over other backends the test's arguments say which are run.
std::vector<Choice> CellsOf(const Choice& axes, size_t part) {
  const bool all =
      DefaultBackend() != "shm" || EnvString("TESSERA_TEST_CELLS") == "all";
  return all ? AllChoices(axes) : Pairwise(axes, part);
}

// Stage, world size, overlap and dtype.
using PeakCell = std::tuple<int, int, bool, std::string>;

std::vector<PeakCell> PeakCells(const std::vector<int>& stages,
                                const std::vector<int>& world_sizes,
                                const std::vector<std::string>& dtypes,
                                size_t part) {
  std::vector<PeakCell> cells;
  for (const Choice& c :
       CellsOf({stages.size(), world_sizes.size(), 2, dtypes.size()}, part)) {
    cells.emplace_back(stages[c[0]], world_sizes[c[1]], c[2] == 1,
                       dtypes[c[3]]);
  }
  return cells;
}

class PeakTest : public ::testing::TestWithParam<PeakCell> {
 protected:
  PeakTest() {
    spec_.steps = 3;
    spec_.stage = std::get<0>(GetParam());
    spec_.overlap = std::get<2>(GetParam());
    spec_.dtype = std::get<3>(GetParam());
    spec_.remainder_masters = spec_.dtype == "remainders";
    if (spec_.remainder_masters) spec_.dtype = "bf16";
    if (world_size() == 4) spec_.shard_group = 2;
    spec_.max_reuse_distance = 0;
    spec_.reduce_bucket_size = 1;
    // The next unit, whichever it is.
    spec_.prefetch_bucket_size = 1;
  }
  int world_size() const { return std::get<1>(GetParam()); }
  int shards() const {
    return spec_.shard_group > 0 ? spec_.shard_group : world_size();
  }
  TrainingSpec spec_;
};

TEST_P(PeakTest, IsWithinTheFormula) {
  const auto [whole, largest] = NumelOf(shards());
  const bool narrow = spec_.dtype != "fp32";
  const int64_t item = narrow ? 2 : 4;  // of working copies and sums
  // What is kept of masters beside working copies.
  const int64_t master = spec_.remainder_masters ? 2 : narrow ? 4 : 0;
  const int64_t shard = whole / shards();
  const int64_t owned = spec_.stage >= 1 ? shard : whole;
  // Between uses.
  const int64_t parameters =
      (spec_.stage >= 3 ? shard : whole) * item + owned * master;
  const int64_t optimizer = 2 * owned * 4;
  // Alone a rank's sums are the gradients, and stay in their dtype.
  const bool as_summed = world_size() == 1 || !narrow;
  const int64_t gradients = spec_.stage >= 2
                                ? owned * (as_summed ? item : 4)
                                : whole * item + (as_summed ? 0 : owned * 4);
  const int64_t unit = largest * item;
  const int64_t in_flight = spec_.overlap ? unit : 0;
  // What is whole, or local, while a unit is at work.
  const bool shared = DefaultBackend() == "shm" && world_size() > 1;
  const bool gathers = spec_.stage >= 3 && !shared && shards() > 1;
  const int64_t forward = gathers ? unit + in_flight : 0;
  const int64_t backward = forward + (spec_.stage >= 2 ? unit + in_flight : 0);

  auto answers =
      RankPool::Get(world_size())->Run("PeaksOfSteps", spec_.ToText());
  for (const auto& answer : answers) {
    ASSERT_TRUE(answer.ok()) << answer.status();
    std::istringstream in(*answer);
    for (int step = 0; step < spec_.steps; ++step) {
      int64_t peak = 0, of_gradients = 0;
      ASSERT_TRUE(in >> peak >> of_gradients);
      const int64_t kept = spec_.stage >= 2 ? 0 : gradients;
      EXPECT_LE(peak, parameters + optimizer + kept + forward + kSlack)
          << "forward of step " << step << ", B = " << unit;
      ASSERT_TRUE(in >> peak >> of_gradients);
      if (spec_.stage >= 2) {
        EXPECT_LE(of_gradients, gradients + unit + in_flight);
      }
      const int64_t bound = parameters + optimizer + gradients + backward;
      EXPECT_LE(peak, bound + kSlack) << "rest of step " << step;
      // The formula says what is held, not only what is enough. The last unit
      // is small, and has no shard before its reduction; alone a rank's sums
      // are the gradients themselves, and it gathers nothing ahead for it.
      const int64_t less = unit + (forward > 0 ? in_flight : 0) +
                           (shards() == 1 ? 2 * in_flight : 0);
      EXPECT_GE(peak, bound - less) << "rest of step " << step;
    }
  }
}

std::string NameOf(const ::testing::TestParamInfo<PeakCell>& info) {
  return absl::StrCat(
      "Stage", std::get<0>(info.param), "World", std::get<1>(info.param),
      std::get<2>(info.param) ? "Overlap" : "InTurn", std::get<3>(info.param));
}

INSTANTIATE_TEST_SUITE_P(
    All, PeakTest,
    ::testing::ValuesIn(PeakCells({0, 1, 2, 3}, {1, 2, 3},
                                  {"fp32", "bf16", "remainders"}, 24)),
    NameOf);

// Two shard groups of two.
INSTANTIATE_TEST_SUITE_P(Groups, PeakTest,
                         ::testing::ValuesIn(PeakCells({1, 2, 3}, {4},
                                                       {"fp32", "bf16"}, 6)),
                         NameOf);

// args: a TrainingSpec. Returns the peak of gradients in a Backward, and what
// is left of them for Step.
TESSERA_RANK_FUNCTION(GradientsOfBackward) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  torch::manual_seed(1);
  MemoryLedger& ledger = MemoryLedger::Host();
  auto model = std::make_shared<DeepModel>();
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, world.communicator()));
  std::string bytes;
  for (int step = 0; step < spec.steps; ++step) {
    const at::Tensor loss = model->Loss(world.rank());
    ledger.ResetPeak();
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    const MemoryReport report = ledger.Report();
    absl::StrAppend(&bytes, report[MemoryKind::kGradients].peak_bytes, " ",
                    report[MemoryKind::kGradients].current_bytes, " ");
    TESSERA_RETURN_IF_ERROR(engine->Step());
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return bytes;
}

class StepInBackwardTest
    : public ::testing::TestWithParam<std::tuple<int, int, bool>> {};

// Two blocks at most: one is reduced while the gradients of the next arrive.
TEST_P(StepInBackwardTest, HoldsTheGradientsOfTheUnitsAtWork) {
  TrainingSpec spec;
  spec.steps = 2;
  spec.stage = std::get<0>(GetParam());
  spec.overlap = std::get<2>(GetParam());
  spec.reduce_bucket_size = 1;
  spec.more = "sharding{step_in_backward:true}";
  const int world_size = std::get<1>(GetParam());
  const int64_t unit = NumelOf(world_size).largest * 4;
  // Alone a rank's sums are the gradients themselves.
  const bool sums_apart = spec.stage >= 2 && world_size > 1;
  // At stage 0 reductions always overlap.
  const int64_t local = spec.overlap || spec.stage == 0 ? 2 * unit : unit;
  const int64_t expected = local + (sums_apart ? unit / world_size : 0);
  for (const auto& answer :
       RankPool::Get(world_size)->Run("GradientsOfBackward", spec.ToText())) {
    ASSERT_TRUE(answer.ok()) << answer.status();
    std::istringstream in(*answer);
    for (int step = 0; step < spec.steps; ++step) {
      int64_t peak = 0, left = -1;
      ASSERT_TRUE(in >> peak >> left);
      EXPECT_EQ(peak, expected) << "step " << step << ", B = " << unit;
      EXPECT_EQ(left, 0) << "step " << step;
    }
  }
}

std::vector<std::tuple<int, int, bool>> StepInBackwardCells() {
  std::vector<std::tuple<int, int, bool>> cells;
  for (const Choice& c : CellsOf({4, 4, 2}, 16)) {
    cells.emplace_back(static_cast<int>(c[0]), static_cast<int>(c[1]) + 1,
                       c[2] == 1);
  }
  return cells;
}

INSTANTIATE_TEST_SUITE_P(All, StepInBackwardTest,
                         ::testing::ValuesIn(StepInBackwardCells()),
                         [](const auto& info) {
                           return absl::StrCat(
                               "Stage", std::get<0>(info.param), "World",
                               std::get<1>(info.param),
                               std::get<2>(info.param) ? "Overlap" : "InTurn");
                         });

}  // namespace
}  // namespace tessera
