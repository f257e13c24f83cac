// A model of one's own, as somebody writes it who has the archive alone: a
// configuration from a string, a loader over tensors, a checkpoint, another
// engine from it, an evaluation, and the proof that all of it is exact.
#include <tessera/extra.h>
#include <tessera/tessera.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "torch/nn/functional/activation.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/linear.h"

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

// [B], of each sample.
at::Tensor Losses(Model& model, const at::Tensor& x) {
  return (model.forward(x) - x.flip(1)).square().mean(1);
}

// Trains six steps, with a checkpoint in `folder` before the last; or, resumed
// from that, the last one. Returns the last loss.
absl::StatusOr<double> Train(const tessera::StartedJob& job,
                             const tessera::TensorData& data,
                             const std::string& folder, bool resumed) {
  tessera::SeedAll(1, *job.world);
  auto model = std::make_shared<Model>();
  int written = 0;
  tessera::EngineOptions options;
  options.metrics_writers = {tessera::WriterOf([&](const auto&) {
    ++written;
    return absl::OkStatus();
  })};
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           tessera::Engine::Create(model, job.config, options));
  tessera::DataLoaderOptions batches;
  batches.batch_size = 16;
  TESSERA_ASSIGN_OR_RETURN(
      auto loader, tessera::LoadInMemory(data.fetch(), data.num_samples(),
                                         job.comm(), batches));
  if (resumed) {
    TESSERA_ASSIGN_OR_RETURN(auto report, engine->LoadCheckpoint(folder));
    TESSERA_ASSIGN_OR_RETURN(auto parts,
                             tessera::UnpackClientState(report.client_state));
    TESSERA_RETURN_IF_ERROR(loader->Load(parts["loader"]));
  }
  double last = 0;
  while (engine->step() < 6) {
    if (!resumed && engine->step() == 5) {
      TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(
          folder, tessera::PackClientState({{"loader", loader->State()}})));
    }
    TESSERA_ASSIGN_OR_RETURN(auto batch, loader->NextOnAll(job.comm()));
    const at::Tensor loss = Losses(*model, batch.tensors[0]).mean();
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    last = loss.item<double>();
  }
  tessera::Mean mean("loss");
  tessera::EvaluateOptions by_20;
  by_20.batch_size = 20;
  TESSERA_RETURN_IF_ERROR(tessera::Evaluate(
      engine.get(), {&mean}, data.num_samples(),
      [&](absl::Span<const int64_t> samples) -> absl::Status {
        mean.Add(Losses(*model, data.Rows(samples)[0]));
        return absl::OkStatus();
      },
      by_20));
  tessera::SummaryOptions units;
  units.engine = engine.get();
  if (job.world->rank() == 0 && resumed) {
    std::printf("%s\nloss of all %f\n", tessera::Summary(*model, units).c_str(),
                mean.value());
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  if (job.world->rank() == 0 && written == 0) {
    return absl::InternalError("no metrics were written");
  }
  return last;
}

absl::Status Run(int argc, char** argv) {
  tessera::StartOptions options;
  options.config_json = kConfig;
  options.positional = true;
  TESSERA_ASSIGN_OR_RETURN(auto job, tessera::Start(&argc, argv, options));
  at::manual_seed(7);
  TESSERA_ASSIGN_OR_RETURN(auto data,
                           tessera::TensorData::Create({at::randn({100, 32})}));
  TESSERA_ASSIGN_OR_RETURN(const double saved,
                           Train(job, data, argv[1], false));
  TESSERA_ASSIGN_OR_RETURN(const double loaded,
                           Train(job, data, argv[1], true));
  if (saved != loaded) {
    return absl::InternalError("another loss after the checkpoint");
  }
  tessera::VerifyOptions steps;
  steps.steps = 2;
  TESSERA_ASSIGN_OR_RETURN(
      const auto report,
      tessera::Verify(
          [] { return std::make_shared<Model>(); }, job.config,
          [](nn::Module& module, int rank, int64_t micro_batch) {
            at::manual_seed(100 * rank + micro_batch);
            return Losses(*module.as<Model>(), at::randn({16, 32})).mean();
          },
          steps));
  if (job.world->rank() == 0) std::printf("resumed at %.6f, verified\n", saved);
  return report.exact ? absl::OkStatus()
                      : absl::InternalError("not the bits of one process");
}

TESSERA_MAIN(Run)
