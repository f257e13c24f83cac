// This is the smallest program: it trains a plain module in shards.
//
//   bazel run //examples/minimal -- --world=2
#include <cstdio>

#include "ATen/Functions.h"
#include "tessera/tessera.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"

namespace nn = torch::nn;

absl::Status Run(int argc, char** argv) {
  TESSERA_ASSIGN_OR_RETURN(
      auto job,
      tessera::Start(&argc, argv, {.config = "examples/minimal/zero3.json"}));
  tessera::SeedAll(0, *job.world);  // one model; each rank has its own samples
  nn::Sequential model(nn::Linear(64, 256), nn::Linear(256, 1));
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           tessera::Engine::Create(model, job.config));
  for (int step = 0; step < 20; ++step) {
    auto x = at::randn({32, 64});
    auto loss = (model->forward(x) - x.sum(1, true)).square().mean();
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    if (job.world->rank() == 0) {
      std::printf("%2d %.4f\n", step, loss.item<float>());
    }
  }
  return engine->Close();
}

TESSERA_MAIN(Run)
