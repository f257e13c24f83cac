// A checkpoint also holds buffers of any dtype, each rank's own where they
// differ, and parameters that the engine leaves alone.
#include <torch/torch.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/crc32c.h"
#include "base/status.h"
#include "checkpoint/exchange/name_map.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "comm/world/world.h"
#include "config/config.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

constexpr int kFeatures = 6;

// The batch norm has no common batch, so each rank has its own statistics.
struct Normed : torch::nn::Module {
  Normed() {
    layer = register_module("layer", torch::nn::Linear(kFeatures, kFeatures));
    norm = register_module("norm", torch::nn::BatchNorm1d(kFeatures));
    alone = register_parameter("alone", torch::rand({3, 5}));
    phases = register_buffer("phases", torch::rand({4}, torch::kComplexFloat));
    mask = register_buffer("mask", torch::rand({2, 3}) > 0.5);
    turned = register_buffer("turned", torch::rand({3, 7}).t());
    none = register_buffer("none", torch::empty({0, 3}));
    // Two names of one.
    register_buffer("mask_again", mask);
  }
  at::Tensor forward(const at::Tensor& x) {
    return norm->forward(layer->forward(x)).pow(2).mean();
  }
  torch::nn::Linear layer{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor alone, phases, mask, turned, none;
};

std::string Print(const std::string& name, const at::Tensor& tensor) {
  const at::Tensor here = tensor.detach().contiguous();
  return absl::StrCat(
      name, " ",
      Crc32c({static_cast<const char*>(here.const_data_ptr()), here.nbytes()}),
      "\n");
}

// Buffers, and the parameter that is not sharded.
std::string OwnState(const Normed& model) {
  std::string text = Print("alone", model.alone);
  for (const auto& buffer : model.named_buffers()) {
    text += Print(buffer.key(), buffer.value());
  }
  return text;
}

absl::StatusOr<std::unique_ptr<Engine>> MakeNormedEngine(
    std::shared_ptr<Normed> model, int stage, const World& world) {
  TESSERA_ASSIGN_OR_RETURN(
      const proto::Config config,
      ParseConfig(absl::StrCat(
                      R"({"train_micro_batch_size_per_gpu": 4,
                  "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                  "zero_optimization": {"stage": )",
                      stage, R"(},
                  "sharding": {"ignored_parameters": ["alone"]}})"),
                  "c.json", world.world_size()));
  EngineOptions options;
  options.communicator = world.communicator();
  options.buffers_may_differ = true;
  return Engine::Create(model, config, options);
}

absl::Status Train(Engine& engine, Normed& model, int rank, int steps) {
  for (int step = 0; step < steps; ++step) {
    TESSERA_RETURN_IF_ERROR(engine.Backward(model.forward(
        torch::rand({4, kFeatures}) * static_cast<float>(rank + 1))));
    TESSERA_RETURN_IF_ERROR(engine.Step());
  }
  return absl::OkStatus();
}

TESSERA_RANK_FUNCTION(SaveBuffers) {
  const std::vector<std::string> parts = absl::StrSplit(args, '\n');
  torch::manual_seed(5);
  auto model = std::make_shared<Normed>();
  TESSERA_ASSIGN_OR_RETURN(
      auto engine, MakeNormedEngine(model, parts[1] == "3" ? 3 : 0, world));
  TESSERA_RETURN_IF_ERROR(Train(*engine, *model, world.rank(), 3));
  TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(parts[0]));
  return OwnState(*model);
}

constexpr char kExchanged[] =
    "norm.running_mean norm.running_var\n"
    "norm.running_var norm.running_mean\n";

// "<folder>\n<stage>", and "\nexchanged".
TESSERA_RANK_FUNCTION(LoadBuffers) {
  const std::vector<std::string> parts = absl::StrSplit(args, '\n');
  torch::manual_seed(6);
  auto model = std::make_shared<Normed>();
  TESSERA_ASSIGN_OR_RETURN(
      auto engine, MakeNormedEngine(model, parts[1] == "3" ? 3 : 0, world));
  const std::string before = OwnState(*model);
  LoadCheckpointOptions load;
  if (parts.size() > 2) {
    TESSERA_ASSIGN_OR_RETURN(load.names, NameMap::Parse(kExchanged, "rules"));
  }
  TESSERA_RETURN_IF_ERROR(engine->LoadCheckpoint(parts[0], load).status());
  if (OwnState(*model) == before) return "nothing was loaded";
  return OwnState(*model);
}

TEST(CheckpointBuffersTest, EachRankGetsItsOwn) {
  for (const char* stage : {"0", "3"}) {
    const TempFolder folder;
    const std::string args = absl::StrCat(folder / "ckpt", "\n", stage);
    const std::vector<std::string> saved = RunOnRanks(2, "SaveBuffers", args);
    ASSERT_THAT(saved, Each(HasSubstr("norm.running_mean")));
    EXPECT_NE(saved[0], saved[1]);
    EXPECT_EQ(RunOnRanks(2, "LoadBuffers", args), saved);
    // Other numbers of ranks get rank 0's values.
    EXPECT_THAT(RunOnRanks(3, "LoadBuffers", args), Each(saved[0]));
    EXPECT_THAT(RunOnRanks(1, "LoadBuffers", args), Each(saved[0]));
  }
}

TEST(CheckpointBuffersTest, WhatIsTheSameOnAllIsWrittenByAll) {
  const TempFolder folder;
  const std::string dir = folder / "ckpt";
  RunOnRanks(3, "SaveBuffers", dir + "\n3");
  auto reader = CheckpointReader::Open(dir, FileSystem::Real()).value();
  std::set<int> same, differing;
  for (int s = 0; s < reader.manifest().storages_size(); ++s) {
    const proto::CheckpointStorage& storage = reader.manifest().storages(s);
    if (!storage.buffer() || storage.numel() == 0) continue;
    const bool of_norm =
        absl::StartsWith(storage.tensors(0).name(), "norm.running");
    const auto files = reader.FilesOf({{s, 0, 0, storage.numel(), nullptr}});
    (of_norm ? differing : same).insert(files->begin(), files->end());
  }
  EXPECT_THAT(same, IsSupersetOf({1, 2}));
  EXPECT_THAT(differing, ElementsAre(0));
}

TEST(CheckpointBuffersTest, EachRankGetsItsOwnByOtherNames) {
  const TempFolder folder;
  const std::string args = absl::StrCat(folder / "ckpt", "\n0");
  std::vector<std::string> saved = RunOnRanks(2, "SaveBuffers", args);
  const std::string mean = "norm.running_mean", var = "norm.running_var";
  for (std::string& rank : saved) {
    std::vector<std::string> lines = absl::StrSplit(rank, '\n');
    std::string *mean_line = nullptr, *var_line = nullptr;
    for (std::string& line : lines) {
      if (absl::StartsWith(line, mean)) mean_line = &line;
      if (absl::StartsWith(line, var)) var_line = &line;
    }
    ASSERT_TRUE(mean_line != nullptr && var_line != nullptr) << rank;
    const std::string old_mean = mean_line->substr(mean.size());
    *mean_line = mean + var_line->substr(var.size());
    *var_line = var + old_mean;
    rank = absl::StrJoin(lines, "\n");
  }
  EXPECT_EQ(RunOnRanks(2, "LoadBuffers", args + "\nexchanged"), saved);
}

struct WithSparse : torch::nn::Module {
  WithSparse() {
    register_module("layer", torch::nn::Linear(2, 2));
    register_buffer("pattern", torch::eye(3).to_sparse());
  }
};

TESSERA_RANK_FUNCTION(SaveSparse) {
  TESSERA_ASSIGN_OR_RETURN(
      const proto::Config config,
      ParseConfig(R"({"train_micro_batch_size_per_gpu": 1})", "c.json",
                  world.world_size()));
  EngineOptions options;
  options.communicator = world.communicator();
  TESSERA_ASSIGN_OR_RETURN(
      auto engine,
      Engine::Create(std::make_shared<WithSparse>(), config, options));
  return engine->SaveCheckpoint(std::string(args)).ToString();
}

TEST(CheckpointBuffersTest, WhatItCannotHoldIsAnError) {
  const TempFolder folder;
  EXPECT_THAT(RunOnRanks(2, "SaveSparse", folder / "ckpt"),
              Each(HasSubstr("'pattern'")));
}

}  // namespace
}  // namespace tessera
