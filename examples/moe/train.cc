// Trains a mixture of experts in shards: each expert is a unit, gathered where
// a token uses it, whatever the other ranks do meanwhile.
//
//   train --world=2 --data=kjv.txt --steps=100
//
// zero3.json configures it: units are blocks and experts; gathers are
// one-sided, since over nccl they would be collectives, for which all ranks
// would have to use the same experts in the same order.
#include <tessera/tessera.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "examples/moe/moe.h"
#include "examples/text/token_loader.h"
#include "examples/text/train_step.h"

ABSL_FLAG(std::string, data, "", "Text file, one token per byte.");
ABSL_FLAG(int64_t, steps, 100, "Optimizer steps.");
ABSL_FLAG(int64_t, seq, 64, "Tokens per sample.");
ABSL_FLAG(int64_t, experts, 8, "Number of experts per layer.");
ABSL_FLAG(uint64_t, seed, 1, "Seed of initial values and data order.");

namespace {

absl::Status Run(int argc, char** argv) {
  TESSERA_ASSIGN_OR_RETURN(
      const tessera::StartedJob job,
      tessera::Start(&argc, argv,
                     {.about = "trains a mixture of experts",
                      .config = "examples/moe/zero3.json"}));
  const tessera::World& world = *job.world;
  TokenTextOptions text;
  text.path = absl::GetFlag(FLAGS_data);
  text.seq = absl::GetFlag(FLAGS_seq);
  text.seed = absl::GetFlag(FLAGS_seed);
  absl::StatusOr<TokenText> data = TokenText::Open(text);
  TESSERA_RETURN_IF_ERROR(job.comm().AgreeOk(data.status(), "the data"));

  tessera::SeedAll(absl::GetFlag(FLAGS_seed), world);
  Moe model(MoeOptions()
                .seq(absl::GetFlag(FLAGS_seq))
                .experts(absl::GetFlag(FLAGS_experts)));
  tessera::EngineOptions options;
  options.device = world.device();
  TESSERA_ASSIGN_OR_RETURN(const auto engine,
                           tessera::Engine::Create(model, job.config, options));
  TESSERA_ASSIGN_OR_RETURN(
      const auto loader,
      data->Load(engine->config().train_micro_batch_size_per_gpu(), world));
  const auto batches =
      static_cast<float>(engine->config().gradient_accumulation_steps());
  at::Tensor both;     // sums of cross entropies and balances in a step
  int64_t unused = 0;  // experts of all layers that had no token here
  const auto loss_of = [&](const TokenBatch& batch) {
    const at::Tensor loss = model->loss(batch.tokens, batch.targets);
    const at::Tensor parts =
        at::stack({model->cross_entropy(), model->balance()});
    both = both.defined() ? both + parts : parts;
    unused = model->unused_experts();
    return loss;
  };
  while (engine->step() < absl::GetFlag(FLAGS_steps)) {
    both.reset();
    TESSERA_RETURN_IF_ERROR(
        TrainStep(engine.get(), loader.get(), loss_of).status());
    const at::Tensor means = (both / batches).cpu();
    const float loss = means[0].item<float>();
    std::printf(
        "step %lld rank %d loss %.6f %a, %lld experts without a token, "
        "balance %.3f%s\n",
        static_cast<long long>(engine->step()), world.rank(), loss, loss,
        static_cast<long long>(unused), means[1].item<float>(),
        SkippedNote(*engine));
  }
  return engine->Close();
}

}  // namespace

TESSERA_MAIN(Run)
