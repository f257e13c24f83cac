// Trains a mixture of experts in shards: each expert is a unit, gathered where
// a token uses it, whatever the other ranks do meanwhile.
//
//   train --world=2 --data=kjv.txt --steps=100
//
// zero3.json configures it: units are blocks and experts; gathers are
// one-sided, since over nccl they would be collectives, for which all ranks
// would have to use the same experts in the same order.
#include <cstdint>
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "absl/strings/str_format.h"
#include "examples/moe/moe.h"
#include "examples/text/token_loader.h"
#include "examples/text/train_step.h"
#include "tessera/tessera.h"

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
  const int64_t steps = absl::GetFlag(FLAGS_steps);
  const int64_t batches = engine->config().gradient_accumulation_steps();
  at::Tensor both;     // sums of cross entropies and balances in a step
  int64_t unused = 0;  // experts of all layers that had no token here
  // For people: means over ranks.
  const auto words = [&]() -> absl::StatusOr<std::string> {
    at::Tensor sums =
        at::stack({both[1] / batches, at::full({}, unused, both.options())});
    TESSERA_RETURN_IF_ERROR(
        job.comm().AllReduceSum(sums, {"balance and idle experts"}).Wait());
    sums /= world.world_size();
    return absl::StrFormat("balance %.3f, %.1f experts without a token",
                           sums[0].item<float>(), sums[1].item<float>());
  };
  const auto loss_of = [&](const TokenBatch& batch) {
    const at::Tensor loss = model->loss(batch.tokens, batch.targets);
    const at::Tensor parts =
        at::stack({model->cross_entropy(), model->balance()});
    both = both.defined() ? both + parts : parts;
    unused = model->unused_experts();
    return loss;
  };
  engine->monitor().SetTokensPerSample(absl::GetFlag(FLAGS_seq));
  tessera::Progress progress(engine.get(), {.steps = steps});
  while (engine->step() < steps) {
    both.reset();
    TESSERA_RETURN_IF_ERROR(
        TrainStep(engine.get(), loader.get(), loss_of).status());
    std::string said;
    if (progress.IsDue()) {
      TESSERA_ASSIGN_OR_RETURN(said, words());
    }
    TESSERA_RETURN_IF_ERROR(progress.Show(both[0] / batches, said));
  }
  return engine->Close();
}

}  // namespace

TESSERA_MAIN(Run)
