// Tests activations that are elsewhere between forward and backward: the bits
// are the oracle's, which does not offload, and memory does not grow with
// depth.
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/pairwise.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

const std::vector<int> kWorldSizes = {1, 2};
const std::vector<std::string> kDtypes = {"fp32", "bf16", "fp16"};
const std::vector<std::string> kPolicies = {"full", "selective", "keep"};
const std::vector<std::string> kModels = {"Gpt", "Mlp", "Clamped",
                                          "ChangingRank"};
//  world size, stage, dtype, policy, accumulation, model, states on the disk
const Choice kAxes = {2, 4, 3, 3, 2, 4, 2};

// Activations go to the disk or, on a device without hardware, to the host.
TrainingSpec SpecOf(const Choice& choice, const std::string& device) {
  TrainingSpec spec;
  spec.steps = 3;
  spec.stage = choice[1];
  spec.dtype = kDtypes[choice[2]];
  spec.recompute = absl::StrCat("auto/", kPolicies[choice[3]]);
  spec.accumulation = choice[4] == 0 ? 1 : 3;
  spec.model = kModels[choice[5]];
  if (choice[6] == 1 && spec.stage > 0) spec.states_on_disk = 1;
  spec.tier = device.empty() ? "nvme" : "cpu";
  spec.activations = spec.tier;
  spec.device = device;
  spec.initial_scale_power = 8;
  spec.poison = device.empty();
  return spec;
}

// Every other cell is that of a device with threads; each of its values occurs
// with both kinds of devices.
void ExpectOraclesBits(int world_size, bool on_device) {
  static const std::vector<Choice> cells = Pairwise(kAxes, 24);
  int run = 0;
  for (size_t i = 0; i < cells.size(); ++i) {
    if (kWorldSizes[cells[i][0]] != world_size) continue;
    const std::string device = i % 2 == 0 ? "1" : "1/workers";
    ExpectEqualsOracle(SpecOf(cells[i], on_device ? device : ""), world_size);
    ++run;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(run, 0);
}

// First, since libtorch counts the devices at a process's first backward.
TEST(Activations, OfADeviceOnTheHostHaveTheOraclesBits) {
  for (const int world_size : kWorldSizes) ExpectOraclesBits(world_size, true);
}

TEST(Activations, OnADiskHaveTheOraclesBits) {
  for (const int world_size : kWorldSizes) ExpectOraclesBits(world_size, false);
}

// ---- what is held, and what is said

// A chain of blocks each of whose activations has this many bytes.
constexpr int64_t kDim = 64, kRows = 4096;
constexpr int64_t kActivation = kDim * kRows * 4;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    up = register_module("up", torch::nn::Linear(kDim, kDim));
    down = register_module("down", torch::nn::Linear(kDim, kDim));
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + down(torch::tanh(up(x)));
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct Chain : torch::nn::Module {
  // A negative depth means `uses` times the same block.
  explicit Chain(int depth) : uses(std::max(1, -depth)) {
    for (int i = 0; i < std::max(1, depth); ++i) blocks->push_back(Block());
    register_module("blocks", blocks);
  }
  at::Tensor Loss() {
    at::Tensor x = torch::ones({kRows, kDim});
    for (int use = 0; use < uses; ++use) {
      for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    }
    return x.pow(2).mean();
  }
  int uses;
  torch::nn::ModuleList blocks;
};

// args: "<depth>|<policy>|<folder>"; "": nothing is done to activations. The
// peak of activations, in units of kActivation, and what has moved.
TESSERA_RANK_FUNCTION(TrainChain) {
  const std::vector<std::string> words = absl::StrSplit(args, '|');
  at::set_num_threads(1);
  torch::manual_seed(3);
  auto chain = std::make_shared<Chain>(std::stoi(words[0]));
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_zero_optimization()->set_stage(3);
  config.mutable_sharding()->add_unit_classes("Block");
  if (!words[1].empty()) {
    auto* const activations = config.mutable_activation_checkpointing();
    activations->add_units("Block");
    activations->set_policy(words[1]);
    activations->set_offload("nvme");
    activations->set_nvme_path(words[2]);
  }
  TESSERA_ASSIGN_OR_RETURN(const auto engine,
                           Engine::Create(chain, config, {}));
  std::string losses;
  for (int step = 0; step < 3; ++step) {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor loss, CatchTorch("forward", [&] {
                               return chain->Loss();
                             }));
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    absl::StrAppendFormat(&losses, " %a", loss.item<double>());
  }
  const StepReport& report = engine->last_step();
  const int64_t held = report.memory.peak_bytes;
  const RecomputeReport moved = report.recompute;
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return absl::StrCat(held / kActivation, "|", moved.moved_bytes / kActivation,
                      "|", moved.moved_back_bytes / kActivation, "|", losses);
}

struct Moved {
  int64_t held = -1, out = -1, back = -1;
  std::string losses;
};

Moved TrainChainOf(int depth, const std::string& policy,
                   const std::string& folder) {
  const auto said = RunOnRanks(2, "TrainChain",
                               absl::StrCat(depth, "|", policy, "|", folder));
  EXPECT_EQ(said[0].substr(said[0].rfind('|')),
            said[1].substr(said[1].rfind('|')));
  const std::vector<std::string> words = absl::StrSplit(said[0], '|');
  Moved moved;
  if (words.size() != 4 || !absl::SimpleAtoi(words[0], &moved.held) ||
      !absl::SimpleAtoi(words[1], &moved.out) ||
      !absl::SimpleAtoi(words[2], &moved.back)) {
    ADD_FAILURE() << said[0];
    return moved;
  }
  moved.losses = words[3];
  return moved;
}

TEST(Activations, WhatIsHeldDoesNotGrowWithDepth) {
  const TempFolder folder;
  constexpr int kDeep = 16;
  const Moved plain = TrainChainOf(kDeep, "", "");
  for (const char* policy : {"keep", "full"}) {
    SCOPED_TRACE(policy);
    const Moved shallow = TrainChainOf(8, policy, folder.path());
    const Moved deep = TrainChainOf(kDeep, policy, folder.path());
    // Two on their way out, and a group that comes back, are held for as long
    // as the disk takes; what grew with depth would be 8 more.
    EXPECT_LE(deep.held, shallow.held + 4);
    // The last block keeps its own. Each saves its input, and of the two
    // products one more: a tanh, which is made again.
    const int each = *policy == 'k' ? 2 : 1;
    EXPECT_EQ(deep.out, (kDeep - 1) * each);
    EXPECT_LE(deep.back, deep.out);
    EXPECT_GE(deep.back, deep.out - 2);  // what had not left when it was wanted
    EXPECT_GE(plain.held, deep.held + (kDeep - 4) * each);
    EXPECT_EQ(plain.losses, deep.losses);
  }
}

TEST(Activations, EachUseOfAModuleIsOne) {
  const TempFolder folder;
  const Moved plain = TrainChainOf(-8, "", "");
  for (const char* policy : {"keep", "full"}) {
    SCOPED_TRACE(policy);
    const Moved moved = TrainChainOf(-8, policy, folder.path());
    EXPECT_EQ(moved.out, 7 * (*policy == 'k' ? 2 : 1));
    EXPECT_EQ(moved.losses, plain.losses);
  }
}

TEST(Activations, AFolderThatIsNoneIsNamed) {
  EXPECT_THAT(RunOnRanks(2, "TrainChain", "4|full|/proc/nowhere"),
              Each(HasSubstr("activation_checkpointing.nvme_path")));
}

}  // namespace
}  // namespace tessera
