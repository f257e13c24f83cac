// Trains a model of your own in shards (docs/quickstart.md).
//
//   train --world=2
#include <memory>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "absl/flags/flag.h"
#include "tessera/tessera.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"

ABSL_FLAG(std::string, dir, "run/ckpt", "Folder of the checkpoint.");

namespace nn = torch::nn;

// A class with two or more instances: each instance becomes a unit, that is, it
// is gathered, used and freed as a whole.
struct Block : nn::Module {
  explicit Block(int64_t width)
      : norm(register_module("norm",
                             nn::LayerNorm(nn::LayerNormOptions({width})))),
        up(register_module("up", nn::Linear(width, 4 * width))),
        down(register_module("down", nn::Linear(4 * width, width))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x + down(up(norm(x)).relu());
  }
  nn::LayerNorm norm;
  nn::Linear up, down;
};

struct Net : nn::Module {
  Net() {
    for (int i = 0; i < 4; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i),
                                       std::make_shared<Block>(512)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block->forward(x);
    return head(x);
  }
  std::vector<std::shared_ptr<Block>> blocks;
  nn::Linear head = register_module("head", nn::Linear(512, 1));
};

absl::Status Run(int argc, char** argv) {
  // Reads the flags (--world=N starts N ranks) and the configuration.
  TESSERA_ASSIGN_OR_RETURN(
      auto job, tessera::Start(&argc, argv, {.config = "train.json"}));
  // Initial values are the same on all ranks; their data differ after Create.
  tessera::SeedAll(0, *job.world);
  auto net = std::make_shared<Net>();
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           tessera::Engine::Create(net, job.config));
  // Says on rank 0 where the training is: the loss is the mean over ranks.
  tessera::Progress progress(engine.get(), {.steps = 100});
  while (engine->step() < 100) {
    const at::Tensor x = at::randn({16, 512});
    const at::Tensor y = x.slice(1, 0, 8).prod(1, /*keepdim=*/true);
    const at::Tensor loss = (net->forward(x) - y).square().mean();
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    TESSERA_RETURN_IF_ERROR(progress.Show(loss));
  }
  TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(absl::GetFlag(FLAGS_dir)));
  return engine->Close();
}

TESSERA_MAIN(Run)
