// A model of one's own, as somebody writes it who has the archive alone: a
// configuration from a string, a sampler, a checkpoint, another engine from it.
#include <cstdio>
#include <string>

#include "ATen/Functions.h"
#include "data/distributed_sampler.h"
#include "engine/tessera.h"
#include "torch/nn/functional/activation.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/linear.h"
#include "verify/verify.h"

namespace nn = torch::nn;

constexpr char kConfig[] = R"({
  "train_micro_batch_size_per_gpu": 16,
  "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
  "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}
})";

struct Block : nn::Module {
  explicit Block(int64_t width)
      : up(register_module("up", nn::Linear(width, 4 * width))),
        down(register_module("down", nn::Linear(4 * width, width))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(up(x).relu()); }
  nn::Linear up, down;
};

struct Model : nn::Module {
  Model()
      : a(register_module("a", std::make_shared<Block>(32))),
        b(register_module("b", std::make_shared<Block>(32))) {}
  at::Tensor forward(const at::Tensor& x) { return b->forward(a->forward(x)); }
  std::shared_ptr<Block> a, b;
};

at::Tensor Loss(Model& model) {
  const at::Tensor x = at::randn({16, 32});
  return (model.forward(x) - x.flip(1)).square().mean();
}

absl::Status Run(int argc, char** argv) {
  TESSERA_ASSIGN_OR_RETURN(auto* world, tessera::Init(&argc, argv));
  TESSERA_ASSIGN_OR_RETURN(
      const tessera::proto::Config config,
      tessera::ParseConfig(kConfig, "user.json", world->world_size()));
  const std::string folder = argv[1];
  TESSERA_ASSIGN_OR_RETURN(
      auto sampler,
      tessera::DistributedSampler::Create({.num_samples = 100,
                                           .rank = world->rank(),
                                           .world_size = world->world_size()}));
  sampler.NextBatch(16);
  double saved = 0;
  for (const bool resumed : {false, true}) {
    at::manual_seed(1);
    auto model = std::make_shared<Model>();
    TESSERA_ASSIGN_OR_RETURN(auto engine,
                             tessera::Engine::Create(model, config));
    if (resumed)
      TESSERA_RETURN_IF_ERROR(engine->LoadCheckpoint(folder).status());
    at::manual_seed(world->rank());
    double loss = 0;
    for (int step = 0; step < (resumed ? 1 : 6); ++step) {
      if (!resumed && step == 5) {
        TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(folder));
        at::manual_seed(world->rank());
      }
      const at::Tensor now = Loss(*model);
      TESSERA_RETURN_IF_ERROR(engine->Backward(now));
      TESSERA_RETURN_IF_ERROR(engine->Step());
      loss = now.item<double>();
    }
    if (resumed && loss != saved) {
      return absl::InternalError("another loss after the checkpoint");
    }
    saved = loss;
    TESSERA_RETURN_IF_ERROR(engine->Close());
  }
  const tessera::VerifyOptions options = {.steps = 2};
  TESSERA_ASSIGN_OR_RETURN(
      const auto report,
      tessera::Verify([] { return std::make_shared<Model>(); }, config,
                      [](nn::Module& module, int rank, int64_t micro_batch) {
                        at::manual_seed(100 * rank + micro_batch);
                        return Loss(*module.as<Model>());
                      },
                      options));
  if (world->rank() == 0) std::printf("resumed at %.6f, verified\n", saved);
  return report.exact ? absl::OkStatus()
                      : absl::InternalError("not the bits of one process");
}

int main(int argc, char** argv) {
  auto status = tessera::CatchTorch("user", [&] { return Run(argc, argv); });
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  tessera::Shutdown();
  return status.ok() ? 0 : 1;
}
