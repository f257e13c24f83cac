// Trains a Llama in shards, from scratch or from a folder of Hugging Face's,
// and writes such a folder.
//
//   train --world=2 --model=/models/Llama-3.2-1B --load --data=text.bin
//         --steps=100 --checkpoints=run --out=tuned --sample=200
//
// The model (llama.h) and its sizes (llama_config.h) know nothing of Tessera;
// everything that a program has to do is in Run.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "ATen/ops/zeros.h"
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "examples/llama/llama.h"
#include "examples/llama/llama_config.h"
#include "examples/text/generate.h"
#include "examples/text/token_loader.h"
#include "examples/text/train_step.h"
#include "tessera/tessera.h"

ABSL_FLAG(std::string, model, "examples/llama/tiny.json",
          "Hugging Face's config.json, or its folder: the model's sizes.");
ABSL_FLAG(bool, load, false,
          "Load the weights from the safetensors files in the folder --model; "
          "by default they are random.");
ABSL_FLAG(
    std::string, data, "",
    "Pattern of token files: llm.c's format, or --token_bytes per token.");
ABSL_FLAG(int64_t, token_bytes, 1,
          "1: any text, one token per byte; 2: nanoGPT's files; 4: uint32.");
ABSL_FLAG(int64_t, steps, 100,
          "Optimizer steps, including those before a resume.");
ABSL_FLAG(int64_t, seq, 64, "Tokens per sample.");
ABSL_FLAG(uint64_t, seed, 1, "Seed of initial values, data order and sample.");
ABSL_FLAG(std::string, checkpoints, "",
          "Folder: continues from the newest checkpoint in it, and saves one "
          "every --every steps, at the end, and on SIGTERM.");
ABSL_FLAG(int64_t, every, 100, "Steps between checkpoints.");
ABSL_FLAG(std::string, out, "",
          "Folder for model.safetensors and config.json, for transformers' "
          "LlamaForCausalLM.");
ABSL_FLAG(int64_t, sample, 0, "Number of tokens to generate at the end.");
ABSL_FLAG(std::string, prompt, "In the beginning ",
          "Text that --sample continues.");

namespace {

absl::Status CheckFlags(tessera::StartOptions*) {
  if (absl::GetFlag(FLAGS_sample) > 0 && absl::GetFlag(FLAGS_prompt).empty()) {
    return absl::InvalidArgumentError("--prompt: expected a text");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<TokenText>> OpenData(const LlamaOptions& model) {
  TokenTextOptions options;
  options.path = absl::GetFlag(FLAGS_data);
  options.seq = absl::GetFlag(FLAGS_seq);
  options.seed = absl::GetFlag(FLAGS_seed);
  if (options.seq < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--seq: expected a whole number above 0, got ", options.seq));
  }
  if (options.path.empty()) return std::optional<TokenText>();
  options.vocab_size = model.vocab();
  switch (absl::GetFlag(FLAGS_token_bytes)) {
    case 1:
      options.type = tessera::TokenType::kUint8;
      break;
    case 2:
      options.type = tessera::TokenType::kUint16;
      break;
    case 4:
      options.type = tessera::TokenType::kUint32;
      break;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("--token_bytes: expected 1, 2 or 4, got ",
                       absl::GetFlag(FLAGS_token_bytes)));
  }
  return TokenText::Open(options);
}

// Returns false if it was asked to end before the last step, and has saved.
absl::StatusOr<bool> Train(Llama& model, tessera::Engine& engine,
                           const TokenText& data, const tessera::World& world) {
  TESSERA_ASSIGN_OR_RETURN(
      const auto loader,
      data.Load(engine.config().train_micro_batch_size_per_gpu(),
                engine.data_rank(), engine.data_world_size(), world.device()));
  std::unique_ptr<tessera::CheckpointManager> manager;
  if (!absl::GetFlag(FLAGS_checkpoints).empty()) {
    tessera::CheckpointManagerOptions options;
    options.dir = absl::GetFlag(FLAGS_checkpoints);
    options.every_steps = absl::GetFlag(FLAGS_every);
    TESSERA_ASSIGN_OR_RETURN(
        manager, tessera::CheckpointManager::Create(&engine, options));
    TESSERA_ASSIGN_OR_RETURN(const auto place, manager->Resume());
    if (place.has_value()) {
      TESSERA_RETURN_IF_ERROR(world.communicator()->AgreeOk(
          loader->Load(*place), "the place in the data"));
    }
  }
  const auto place = [&] { return loader->State(); };
  const int64_t steps = absl::GetFlag(FLAGS_steps);
  engine.monitor().SetTokensPerSample(absl::GetFlag(FLAGS_seq));
  tessera::Progress progress(&engine, {.steps = steps});
  while (engine.step() < steps) {
    TESSERA_ASSIGN_OR_RETURN(
        const at::Tensor sum,
        TrainStep(&engine, loader.get(), [&](const TokenBatch& batch) {
          return model->loss(tessera::DivideSequence(*model, batch.tokens, 1),
                             batch.targets);
        }));
    TESSERA_RETURN_IF_ERROR(
        progress.Show(sum.div(engine.config().gradient_accumulation_steps())));
    if (manager == nullptr) continue;
    TESSERA_ASSIGN_OR_RETURN(const bool told_to_end, manager->MaybeSave(place));
    if (told_to_end) return false;
  }
  if (manager != nullptr) TESSERA_RETURN_IF_ERROR(manager->Finish(place));
  return true;
}

// Writes what transformers' from_pretrained loads.
absl::Status Export(tessera::Engine& engine, const LlamaOptions& options,
                    int rank) {
  const std::string out = absl::GetFlag(FLAGS_out);
  TESSERA_RETURN_IF_ERROR(engine.SaveSafetensors(out));
  return engine.communicator()->AgreeOk(
      rank == 0 ? WriteLlamaConfig(options, out) : absl::OkStatus(),
      "config.json");
}

absl::Status Run(int argc, char** argv) {
  TESSERA_ASSIGN_OR_RETURN(
      const tessera::StartedJob job,
      tessera::Start(&argc, argv,
                     {.about = "trains a Llama in shards",
                      .config = "examples/llama/zero3.json",
                      .flags_read = CheckFlags}));
  const tessera::World& world = *job.world;
  TESSERA_ASSIGN_OR_RETURN(const std::string folder,
                           job.Find(absl::GetFlag(FLAGS_model), "model"));
  // An error on one rank is shared with all, so that none waits for it.
  const absl::StatusOr<LlamaOptions> read = ReadLlamaConfig(folder);
  TESSERA_RETURN_IF_ERROR(job.comm().AgreeOk(read.status(), "the model"));
  const LlamaOptions& options = *read;
  absl::StatusOr<std::optional<TokenText>> data = OpenData(options);
  TESSERA_RETURN_IF_ERROR(job.comm().AgreeOk(data.status(), "the data"));

  tessera::SeedAll(absl::GetFlag(FLAGS_seed), world);
  Llama model(options);
  tessera::EngineOptions engine_options;
  engine_options.device = world.device();
  // What is divided, and where stages begin, is found.
  if (tessera::TensorRanksOf(job.config) > 1 ||
      tessera::PipelineRanksOf(job.config) > 1) {
    engine_options.planned_loss = [&](int64_t samples) {
      const at::Tensor tokens =
          at::zeros({samples, absl::GetFlag(FLAGS_seq)}, at::kLong);
      return model->loss(tokens, tokens);
    };
  }
  TESSERA_ASSIGN_OR_RETURN(
      const std::unique_ptr<tessera::Engine> engine,
      tessera::Engine::Create(model, job.config, engine_options));
  if (absl::GetFlag(FLAGS_load)) {
    TESSERA_RETURN_IF_ERROR(engine->LoadSafetensors(folder).status());
  }
  if (data->has_value()) {
    TESSERA_ASSIGN_OR_RETURN(const bool finished,
                             Train(model, *engine, **data, world));
    if (!finished) return engine->Close();
  }
  if (!absl::GetFlag(FLAGS_out).empty()) {
    TESSERA_RETURN_IF_ERROR(Export(*engine, options, world.rank()));
  }
  if (absl::GetFlag(FLAGS_sample) > 0) {
    GenerateOptions how;
    how.count = absl::GetFlag(FLAGS_sample);
    how.context = absl::GetFlag(FLAGS_seq);
    how.seed = absl::GetFlag(FLAGS_seed);
    const auto tokens = Generate(
        [&](const at::Tensor& seen) {
          return engine
              ->EvalBatch(
                  [&] { return model->forward(seen.to(world.device())); })
              .value();
        },
        TokensOf(absl::GetFlag(FLAGS_prompt)), how);
    if (world.rank() == 0) {
      std::printf("%s\n", Printable(TextOf(tokens)).c_str());
    }
  }
  return engine->Close();
}

}  // namespace

TESSERA_MAIN(Run)
