// Checkpoints of a model with buffers, loaded where everything else differs:
// number of ranks, stage, shard groups, units, dtype of the working copies.
// Masters, states and buffers are the saved ones, and the next step's gradients
// the oracle's, to the bit.
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/env.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/checkpoint/checkpoint_state.h"
#include "tests/checkpoint/next_step.h"
#include "tests/support/pairwise.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

constexpr char kCut[] = "\n--\n";
constexpr int kSteps = 2;

// "<spec>\n<folder>\n<units>".
struct Args {
  explicit Args(absl::string_view text) {
    const std::vector<std::string> lines = absl::StrSplit(text, '\n');
    spec = TrainingSpec::FromText(lines.at(0));
    dir = lines.at(1);
    units = lines.at(2);
  }
  TrainingSpec spec;
  std::string dir, units;
};

absl::StatusOr<std::unique_ptr<Engine>> EngineOf(
    const Args& a, const std::shared_ptr<TestModel>& model,
    const World& world) {
  proto::Config config = ConfigOf(a.spec);
  if (a.units == "small") config.mutable_sharding()->set_max_unit_numel(60);
  if (a.units == "layers") {
    config.mutable_sharding()->add_unit_classes("torch::nn::Conv2dImpl");
    config.mutable_sharding()->add_unit_classes("torch::nn::LinearImpl");
  }
  EngineOptions options;
  options.communicator = world.communicator();
  options.buffers_may_differ = true;
  return Engine::Create(model, config, options);
}

std::string BuffersOf(const TestModel& model) {
  std::string lines;
  for (const auto& item : model.named_buffers()) {
    absl::StrAppend(&lines, LineOf(item.key(), "value", item.value()), "\n");
  }
  return lines;
}

TESSERA_RANK_FUNCTION(SaveLayout) {
  const Args a(args);
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine, EngineOf(a, model, world));
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), 0, &record));
  TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(a.dir));
  TESSERA_ASSIGN_OR_RETURN(const std::string state, StateOf(*engine, *model));
  return absl::StrCat(state, kCut, BuffersOf(*model));
}

// Loads the checkpoint and makes the next step.
TESSERA_RANK_FUNCTION(LoadLayout) {
  const Args a(args);
  torch::manual_seed(99);
  auto model = MakeTestModel(a.spec.model);
  TESSERA_ASSIGN_OR_RETURN(auto engine, EngineOf(a, model, world));
  TESSERA_RETURN_IF_ERROR(engine->LoadCheckpoint(a.dir).status());
  TESSERA_ASSIGN_OR_RETURN(const std::string state, StateOf(*engine, *model));
  const std::string buffers = BuffersOf(*model);
  torch::manual_seed(TrainingSpec::kRankSeed +
                     static_cast<uint64_t>(world.rank()));
  TrainingSpec next = a.spec;
  next.gradients = true;
  next.steps = static_cast<int>(engine->step()) + 1;
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, next, world.rank(), next.steps - 1, &record));
  return absl::StrCat(state, kCut, buffers, kCut, ToText(record));
}

// Side says how a checkpoint is saved, or loaded.
struct Side {
  Side(size_t ranks, size_t stage, size_t dtype, size_t unit, size_t persistent,
       size_t groups)
      : world_size(static_cast<int>(ranks) + 1) {
    spec.model = "ConvNorm";
    spec.steps = kSteps;
    spec.fp32_norms = true;
    spec.stage = static_cast<int>(stage);
    spec.dtype = dtype == 0 ? "fp32" : "bf16";
    units = std::vector<const char*>{"", "small", "layers"}[unit];
    spec.param_persistence_threshold = persistent == 0 ? 0 : 50;
    if (groups == 1 && world_size == 4 && stage > 0) spec.shard_group = 2;
  }
  std::vector<std::string> Run(const char* function,
                               const std::string& dir) const {
    return RunOnRanks(world_size, function,
                      absl::StrCat(spec.ToText(), "\n", dir, "\n", units));
  }
  std::string Describe() const {
    return absl::StrCat(world_size, " ranks, ", spec.ToText(), " ", units);
  }
  int world_size;
  TrainingSpec spec;
  std::string units;
};

// Numbers of ranks and stages, to save and to load; and dtypes, units,
// persistence and groups. All pairs of the former and all of the latter; with
// TESSERA_TEST_CELLS=all the whole product of the former.
const Choice kRanksAxes = {4, 4, 4, 4};
const Choice kOtherAxes = {2, 2, 3, 3, 2, 2, 2, 2};
constexpr size_t kCells = 16;

TEST(CheckpointLayoutTest, IsNoPartOfIt) {
  const bool all = EnvString("TESSERA_TEST_CELLS") == "all";
  const std::vector<Choice> ranks =
      all ? AllChoices(kRanksAxes) : Pairwise(kRanksAxes, kCells);
  const std::vector<Choice> others = Pairwise(kOtherAxes, kCells);
  const TempFolder folder;
  int cells = 0, groups = 0;
  for (const Choice& r : ranks) {
    const Choice& o = others[static_cast<size_t>(cells) % kCells];
    const Side writer(r[0], r[2], o[0], o[2], o[4], o[6]);
    const Side reader(r[1], r[3], o[1], o[3], o[5], o[7]);
    SCOPED_TRACE(absl::StrCat(writer.Describe(), " to ", reader.Describe()));
    groups += writer.spec.shard_group + reader.spec.shard_group;
    const std::string dir = folder / absl::StrCat(cells++);
    const std::vector<std::string> saved = writer.Run("SaveLayout", dir);
    ASSERT_THAT(saved[0], HasSubstr("norm1.running_mean"));
    const std::vector<std::string> loaded = reader.Run("LoadLayout", dir);
    const auto next =
        NextStepOfOracle(MastersIn(dir), reader.spec, reader.world_size);
    const bool own = writer.world_size == reader.world_size;
    for (size_t rank = 0; rank < loaded.size(); ++rank) {
      const std::vector<std::string> expected =
          absl::StrSplit(saved[own ? rank : 0], absl::ByString(kCut));
      const std::vector<std::string> parts =
          absl::StrSplit(loaded[rank], absl::ByString(kCut));
      ASSERT_EQ(parts.size(), 3u) << loaded[rank];
      EXPECT_EQ(parts[0], expected[0]) << "rank " << rank;
      EXPECT_EQ(parts[1], expected[1]) << "buffers of rank " << rank;
      EXPECT_EQ(FirstDifference(next[rank], RecordFromText(parts[2])), "")
          << "rank " << rank;
    }
    if (HasFailure()) break;
  }
  EXPECT_GT(groups, 0);
}

}  // namespace
}  // namespace tessera
