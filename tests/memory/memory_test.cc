// Compares what a rank holds, by the ledger, with the formulas, state_bytes()
// and the kernel.
#include "base/memory/memory.h"

#include <malloc.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/serve/retired_servers.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

constexpr int64_t kMiB = 1 << 20;

// ---- a model of 201 MB

constexpr int kBlocks = 6;
constexpr int64_t kDim = 1024, kHidden = 4096;
constexpr int kLiveUnits = 2;

struct WideBlock : torch::nn::Module {
  WideBlock()
      : up(register_module("up", torch::nn::Linear(kDim, kHidden))),
        down(register_module("down", torch::nn::Linear(kHidden, kDim))) {}
  torch::nn::Linear up, down;
};

struct WideModel : torch::nn::Module {
  WideModel() {
    for (int i = 0; i < kBlocks; ++i) {
      blocks.push_back(register_module(absl::StrCat("block", i),
                                       std::make_shared<WideBlock>()));
    }
  }
  at::Tensor Loss(int rank) {
    at::Tensor h = torch::full({2, kDim}, 0.1 * (rank + 1));
    for (auto& block : blocks) {
      h = h + block->down(torch::relu(block->up(h)));
    }
    return h.square().mean();
  }
  std::vector<std::shared_ptr<WideBlock>> blocks;
};

// Returns the bytes of one block's shard: storages lie at multiples of 256, and
// P / W is rounded up to such a multiple.
int64_t BlockShardBytes(int world_size) {
  auto align = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const int64_t whole = align(kHidden * kDim * 4) + align(kHidden * 4) +
                        align(kDim * kHidden * 4) + align(kDim * 4);
  return align((whole + world_size - 1) / world_size);
}

// Figures are those of the ledger and the kernel, in bytes.
struct Figures {
  int64_t parameters = 0, gradients = 0, optimizer = 0, working = 0, total = 0;
  int64_t working_peak = 0;
  int64_t anonymous = 0;  // except what is kept for the next allocation

  static absl::StatusOr<Figures> Now() {
    malloc_trim(0);
    TESSERA_ASSIGN_OR_RETURN(ResidentMemory memory, ReadResidentMemory());
    const MemoryReport report = MemoryLedger::Host().Report();
    Figures f;
    f.parameters = report[MemoryKind::kParameters].current_bytes;
    f.gradients = report[MemoryKind::kGradients].current_bytes;
    f.optimizer = report[MemoryKind::kOptimizer].current_bytes;
    f.working = report[MemoryKind::kWorking].current_bytes;
    f.working_peak = report[MemoryKind::kWorking].peak_bytes;
    f.total = report.total.current_bytes;
    f.anonymous = memory.anonymous_bytes - report.kept_bytes;
    return f;
  }
  std::string ToText() const {
    return absl::StrCat(parameters, " ", gradients, " ", optimizer, " ",
                        working, " ", total, " ", working_peak, " ", anonymous);
  }
  static Figures FromText(std::istringstream& in) {
    Figures f;
    in >> f.parameters >> f.gradients >> f.optimizer >> f.working >> f.total >>
        f.working_peak >> f.anonymous;
    EXPECT_FALSE(in.fail());
    return f;
  }
};

// Figures before the model is built, after Create, after a forward, after two
// steps, and after everything has gone.
TESSERA_RANK_FUNCTION(TrainWideModel) {
  at::set_num_threads(1);
  std::vector<std::string> lines;
  auto note = [&]() -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(Figures now, Figures::Now());
    lines.push_back(now.ToText());
    return absl::OkStatus();
  };
  TESSERA_RETURN_IF_ERROR(note());
  torch::manual_seed(1);
  auto model = std::make_shared<WideModel>();
  TrainingSpec spec;
  spec.stage = 3;
  spec.shared = "off";  // the kernel does not say whose shared pages are
  spec.max_live_parameters = kLiveUnits * BlockShardBytes(world.world_size()) *
                             world.world_size() / sizeof(float);
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(note());
  MemoryLedger::Host().ResetPeak();
  for (int step = 0; step < 2; ++step) {
    at::Tensor loss = model->Loss(world.rank());
    if (step == 0) TESSERA_RETURN_IF_ERROR(note());
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine->Step());
  }
  TESSERA_RETURN_IF_ERROR(note());
  engine.reset();
  model.reset();
  WaitForRetiredServers(absl::Seconds(30));  // that other ranks still read from
  TESSERA_RETURN_IF_ERROR(note());
  return ToText(lines);
}

class WideModelTest : public ::testing::TestWithParam<int> {};

TEST_P(WideModelTest, HoldsOneShardBetweenUses) {
  const int world_size = GetParam();
  const int64_t shard = kBlocks * BlockShardBytes(world_size);
  const int64_t unit = BlockShardBytes(world_size) * world_size;
  auto answers =
      RankPool::Get(world_size)->Run("TrainWideModel", "", absl::Seconds(120));
  for (const auto& answer : answers) {
    ASSERT_TRUE(answer.ok()) << answer.status();
    std::istringstream in(*answer);
    const Figures before = Figures::FromText(in);
    const Figures created = Figures::FromText(in);
    const Figures forward = Figures::FromText(in);
    const Figures stepped = Figures::FromText(in);
    const Figures gone = Figures::FromText(in);

    EXPECT_EQ(created.parameters - before.parameters, shard);
    EXPECT_EQ(created.optimizer - before.optimizer, 2 * shard);
    EXPECT_EQ(created.working, before.working);
    // The optimizer's states are not yet touched; the module's own memory has
    // gone.
    EXPECT_LE(created.anonymous - before.anonymous,
              created.total - before.total + 16 * kMiB);

    EXPECT_LE(forward.working - before.working, kLiveUnits * unit);

    EXPECT_EQ(stepped.parameters - before.parameters, shard);
    EXPECT_EQ(stepped.gradients, before.gradients);
    EXPECT_EQ(stepped.optimizer - before.optimizer, 2 * shard);
    EXPECT_EQ(stepped.working, before.working);
    EXPECT_LE(stepped.working_peak - before.working, (kLiveUnits + 1) * unit);
    // Every page is touched now: the kernel says the same as the ledger.
    const int64_t unaccounted =
        (stepped.anonymous - before.anonymous) - (stepped.total - before.total);
    EXPECT_LE(std::abs(unaccounted), 16 * kMiB)
        << "the kernel counts " << stepped.anonymous - before.anonymous
        << ", the ledger " << stepped.total - before.total;

    EXPECT_EQ(gone.parameters, before.parameters);
    EXPECT_EQ(gone.gradients, before.gradients);
    EXPECT_EQ(gone.optimizer, before.optimizer);
    EXPECT_EQ(gone.working, before.working);
    EXPECT_LE(gone.anonymous - before.anonymous,
              gone.total - before.total + 16 * kMiB);
  }
}

INSTANTIATE_TEST_SUITE_P(All, WideModelTest, ::testing::Values(1, 2),
                         [](const auto& info) {
                           return absl::StrCat("World", info.param);
                         });

// ---- state_bytes()

// args: a TrainingSpec.
TESSERA_RANK_FUNCTION(StateBytesAfterAStep) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Figures before, Figures::Now());
  auto model = BuildModel(spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, world.communicator()));
  Figures reduced;  // before the last Step
  for (int i = 0; i < 2 * spec.accumulation; ++i) {
    TESSERA_RETURN_IF_ERROR(engine->Backward(model->Loss(world.rank(), i)));
    TESSERA_ASSIGN_OR_RETURN(reduced, Figures::Now());
    TESSERA_RETURN_IF_ERROR(engine->Step());
  }
  TESSERA_ASSIGN_OR_RETURN(Figures after, Figures::Now());
  if (spec.stage >= 2 && after.gradients != before.gradients) {
    return absl::InternalError("Step left gradients");
  }
  auto describe = [](int64_t parameters, int64_t gradients, int64_t optimizer,
                     int64_t others) {
    return absl::StrCat("parameters ", parameters, ", gradients ", gradients,
                        ", optimizer ", optimizer, ", others ", others);
  };
  const StateBytes bytes = engine->state_bytes();
  const std::string said =
      describe(bytes.parameters, bytes.gradients, bytes.optimizer, 0);
  const std::string held = describe(
      after.parameters - before.parameters,
      (spec.stage >= 2 ? reduced : after).gradients - before.gradients,
      after.optimizer - before.optimizer, after.working - before.working);
  if (said != held) {
    return absl::InternalError(
        absl::StrCat("state_bytes(): ", said, "; the ledger: ", held));
  }
  const StateBytes whole = engine->replicated_state_bytes();
  TESSERA_RETURN_IF_ERROR(engine->Close());
  TESSERA_ASSIGN_OR_RETURN(Figures closed, Figures::Now());
  if (closed.parameters + closed.gradients + closed.optimizer +
          closed.working !=
      before.parameters + before.gradients + before.optimizer +
          before.working) {
    return absl::InternalError("Close left something");
  }
  return absl::StrCat(bytes.parameters, " ", bytes.gradients, " ",
                      bytes.optimizer, " ", whole.parameters, " ",
                      whole.gradients, " ", whole.optimizer);
}

class StateBytesTest
    : public ::testing::TestWithParam<std::tuple<int, int, int>> {};

TEST_P(StateBytesTest, AreTheLedgersAndTheFormulas) {
  const auto [stage, world_size, accumulation] = GetParam();
  TrainingSpec spec;
  spec.model = "Gpt";
  spec.stage = stage;
  spec.accumulation = accumulation;
  auto answers =
      RankPool::Get(world_size)->Run("StateBytesAfterAStep", spec.ToText());
  int64_t payload = 0;
  auto model = BuildModel(spec.model, 0);
  for (const at::Tensor& p : model->parameters()) {
    payload += static_cast<int64_t>(p.nbytes());
  }
  int64_t parameters = 0, gradients = 0, optimizer = 0;  // of all ranks
  for (const auto& answer : answers) {
    ASSERT_TRUE(answer.ok()) << answer.status();
    std::istringstream in(*answer);
    int64_t p, g, o, whole_p, whole_g, whole_o;
    in >> p >> g >> o >> whole_p >> whole_g >> whole_o;
    ASSERT_FALSE(in.fail());
    EXPECT_EQ(whole_p, payload);
    EXPECT_EQ(whole_g, payload);
    EXPECT_EQ(whole_o, 2 * payload);
    parameters += p;
    gradients += g;
    optimizer += o;
  }
  // What all ranks hold together is one copy where it is sharded, else W of
  // them, and the same padding each time.
  const int64_t padded = stage >= 1 ? optimizer / 2 : parameters / world_size;
  EXPECT_EQ(optimizer, 2 * padded * (stage >= 1 ? 1 : world_size));
  EXPECT_EQ(gradients, padded * (stage >= 2 ? 1 : world_size));
  EXPECT_EQ(parameters, padded * (stage >= 3 ? 1 : world_size));
  // At most an alignment per parameter, and per rank of each of 4 units.
  EXPECT_GE(padded, payload);
  EXPECT_LE(padded - payload,
            256 * (static_cast<int64_t>(model->parameters().size()) +
                   4 * world_size));
}

INSTANTIATE_TEST_SUITE_P(All, StateBytesTest,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(1, 2, 3),
                                            ::testing::Values(1, 2)),
                         [](const auto& info) {
                           return absl::StrCat("Stage", std::get<0>(info.param),
                                               "World", std::get<1>(info.param),
                                               "Accumulation",
                                               std::get<2>(info.param));
                         });

}  // namespace
}  // namespace tessera
