// Trains adapters of a Llama whose own values stay unchanged.
//
//   train --world=2 --model=/models/Llama-3.2-1B --data=text.bin --steps=100
//         --adapters=tuned --merged=merged
//
// Lora (lora.h) is plain libtorch and works for other models as well; Tessera
// keeps the frozen base in shards, without optimizer states.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "examples/llama/llama.h"
#include "examples/llama/llama_config.h"
#include "examples/lora/lora.h"
#include "examples/text/token_loader.h"
#include "examples/text/train_step.h"
#include "tessera/tessera.h"

ABSL_FLAG(std::string, model, "",
          "Base model: a folder with config.json and safetensors files.");
ABSL_FLAG(std::string, data, "", "A text, any file; a token is a byte.");
ABSL_FLAG(int64_t, steps, 100,
          "Optimizer steps, including those before --resume.");
ABSL_FLAG(int64_t, seq, 64, "Tokens per sample.");
ABSL_FLAG(uint64_t, seed, 1, "Seed of the adapters and of the data order.");
ABSL_FLAG(int64_t, rank_of_adapters, 8, "Rank of the adapters, peft's r.");
ABSL_FLAG(double, alpha, 16, "Scale of the adapters, peft's lora_alpha.");
ABSL_FLAG(std::string, targets, "q_proj,v_proj",
          "Linear layers that get adapters, by the ends of their paths.");
ABSL_FLAG(std::string, resume, "", "Folder that --save wrote.");
ABSL_FLAG(std::string, save, "", "Folder for the sharded state.");
ABSL_FLAG(std::string, adapters, "",
          "Folder for adapter_model.safetensors and adapter_config.json, for "
          "peft.");
ABSL_FLAG(std::string, merged, "",
          "Folder for the model with the adapters merged into its weights.");

namespace {

absl::Status CheckFlags(tessera::StartOptions*) {
  return absl::GetFlag(FLAGS_model).empty()
             ? absl::InvalidArgumentError("--model: expected a folder")
             : absl::OkStatus();
}

// Returns 64 bits of all values that are not an adapter's (FNV-1a), the same on
// all ranks.
absl::StatusOr<uint64_t> HashOfBase(Llama& model, tessera::Engine& engine) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const auto& item : model->named_parameters()) {
    if (absl::StrContains(item.key(), ".lora_")) continue;
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor whole,
                             engine.Parameter(item.key()));
    const at::Tensor values = whole.cpu().contiguous();
    const auto* const bytes = static_cast<const uint8_t*>(values.data_ptr());
    for (size_t i = 0; i < values.nbytes(); ++i) {
      hash = (hash ^ bytes[i]) * 0x100000001b3;
    }
  }
  return hash;
}

absl::Status Train(Llama& model, const Lora& lora, tessera::Engine& engine,
                   const TokenText& data) {
  TESSERA_ASSIGN_OR_RETURN(
      const auto loader,
      data.Load(engine.config().train_micro_batch_size_per_gpu(),
                *tessera::World::Current()));
  if (const std::string from = absl::GetFlag(FLAGS_resume); !from.empty()) {
    TESSERA_ASSIGN_OR_RETURN(const auto report, engine.LoadCheckpoint(from));
    TESSERA_RETURN_IF_ERROR(engine.communicator()->AgreeOk(
        loader->Load(report.client_state), "the place in the data"));
  }
  const auto loss_of = [&](const TokenBatch& batch) {
    const Lora::Scope adapted(lora);
    return model->loss(batch.tokens, batch.targets);
  };
  const int64_t steps = absl::GetFlag(FLAGS_steps);
  engine.monitor().SetTokensPerSample(absl::GetFlag(FLAGS_seq));
  tessera::Progress progress(&engine, {.steps = steps});
  while (engine.step() < steps) {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor sum,
                             TrainStep(&engine, loader.get(), loss_of));
    TESSERA_RETURN_IF_ERROR(
        progress.Show(sum.div(engine.config().gradient_accumulation_steps())));
  }
  const std::string to = absl::GetFlag(FLAGS_save);
  return to.empty() ? absl::OkStatus()
                    : engine.SaveCheckpoint(to, loader->State());
}

absl::Status SaveMerged(const Lora& lora, tessera::Engine& engine,
                        const LlamaOptions& options, const std::string& dir) {
  TESSERA_RETURN_IF_ERROR(lora.Merge(&engine));
  tessera::SaveSafetensorsOptions save;
  TESSERA_ASSIGN_OR_RETURN(save.names, lora.BaseNames());
  TESSERA_RETURN_IF_ERROR(engine.SaveSafetensors(dir, save));
  return engine.communicator()->AgreeOk(engine.communicator()->rank() == 0
                                            ? WriteLlamaConfig(options, dir)
                                            : absl::OkStatus(),
                                        "config.json");
}

// Reads the base into shards of a model that has adapters. COLLECTIVE.
absl::StatusOr<std::unique_ptr<tessera::Engine>> Shard(
    Llama& model, const Lora& lora, const std::string& base,
    const tessera::StartedJob& job) {
  tessera::EngineOptions options;
  options.device = job.world->device();
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           tessera::Engine::Create(model, job.config, options));
  tessera::LoadSafetensorsOptions load;
  TESSERA_ASSIGN_OR_RETURN(load.names, lora.BaseNames());
  TESSERA_RETURN_IF_ERROR(engine->LoadSafetensors(base, load).status());
  return engine;
}

void SayWhatIsHeld(const char* when, uint64_t hash,
                   const tessera::Engine& engine) {
  const tessera::StateBytes held = engine.state_bytes();
  std::printf(
      "%s: frozen base %016llx; this rank holds %lld bytes of "
      "parameters, %lld of gradients, %lld of optimizer states\n",
      when, static_cast<unsigned long long>(hash),
      static_cast<long long>(held.parameters),
      static_cast<long long>(held.gradients),
      static_cast<long long>(held.optimizer));
}

absl::Status Run(int argc, char** argv) {
  TESSERA_ASSIGN_OR_RETURN(
      const tessera::StartedJob job,
      tessera::Start(&argc, argv,
                     {.about = "trains LoRA adapters of a Llama",
                      .config = "examples/lora/zero3.json",
                      .flags_read = CheckFlags}));
  TESSERA_ASSIGN_OR_RETURN(const std::string base,
                           job.Find(absl::GetFlag(FLAGS_model), "model"));
  // An error on one rank is shared with all, so that none waits for it.
  const absl::StatusOr<LlamaOptions> read = ReadLlamaConfig(base);
  TESSERA_RETURN_IF_ERROR(job.comm().AgreeOk(read.status(), "the model"));
  const LlamaOptions& options = *read;
  TokenTextOptions text;
  text.path = absl::GetFlag(FLAGS_data);
  text.seq = absl::GetFlag(FLAGS_seq);
  text.seed = absl::GetFlag(FLAGS_seed);
  text.vocab_size = options.vocab();
  absl::StatusOr<TokenText> data = TokenText::Open(text);
  TESSERA_RETURN_IF_ERROR(job.comm().AgreeOk(data.status(), "the data"));

  tessera::SeedAll(absl::GetFlag(FLAGS_seed), *job.world);
  Llama model(options);
  LoraOptions adapters;
  adapters.rank = absl::GetFlag(FLAGS_rank_of_adapters);
  adapters.alpha = absl::GetFlag(FLAGS_alpha);
  adapters.targets = absl::StrSplit(absl::GetFlag(FLAGS_targets), ',');
  TESSERA_ASSIGN_OR_RETURN(const std::unique_ptr<Lora> lora,
                           Lora::Add(model.get(), adapters));
  TESSERA_ASSIGN_OR_RETURN(const auto engine, Shard(model, *lora, base, job));
  TESSERA_ASSIGN_OR_RETURN(const uint64_t before, HashOfBase(model, *engine));
  TESSERA_RETURN_IF_ERROR(Train(model, *lora, *engine, *data));
  TESSERA_ASSIGN_OR_RETURN(const uint64_t after, HashOfBase(model, *engine));
  if (job.world->rank() == 0) {
    SayWhatIsHeld("before", before, *engine);
    SayWhatIsHeld("after", after, *engine);
  }
  if (before != after) return absl::InternalError("the frozen base changed");
  if (const std::string dir = absl::GetFlag(FLAGS_adapters); !dir.empty()) {
    TESSERA_RETURN_IF_ERROR(lora->Save(engine.get(), dir, base));
  }
  if (const std::string dir = absl::GetFlag(FLAGS_merged); !dir.empty()) {
    TESSERA_RETURN_IF_ERROR(SaveMerged(*lora, *engine, options, dir));
  }
  return engine->Close();
}

}  // namespace

TESSERA_MAIN(Run)
