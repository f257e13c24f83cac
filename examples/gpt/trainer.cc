#include "examples/gpt/trainer.h"

#include <vector>

#include "ATen/Functions.h"
#include "ATen/Parallel.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "examples/text/generate.h"
#include "examples/text/train_step.h"
#include "tessera/tessera.h"

namespace {

const char* Plural(int64_t count) { return count == 1 ? "" : "s"; }

}  // namespace

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(
    const TrainFlags& flags, const tessera::StartedJob& job) {
  auto trainer = std::unique_ptr<Trainer>(new Trainer(flags, job));
  // What may fail on one rank alone comes first, and ranks agree on it, so that
  // no rank waits for one that has ended.
  TESSERA_RETURN_IF_ERROR(job.comm().AgreeOk(trainer->PrepareData(), "set-up"));
  TESSERA_RETURN_IF_ERROR(job.comm().AgreeEqual(
      trainer->Agreed(), "model, data or steps (by flags)"));
  TESSERA_RETURN_IF_ERROR(trainer->MakeModel());
  return trainer;
}

absl::Status Trainer::PrepareData() {
  if (flags_.data.empty()) return absl::OkStatus();
  TokenTextOptions options;
  options.path = flags_.data;
  options.seq = flags_.model.seq();
  options.held_out = flags_.held_out;
  options.seed = flags_.seed;
  TESSERA_ASSIGN_OR_RETURN(text_, TokenText::Open(options));
  return absl::OkStatus();
}

// Returns settings that a comparison of parameters would not cover.
std::string Trainer::Agreed() const {
  const GptOptions& model = flags_.model;
  return absl::StrCat(
      "--dim ", model.dim(), " --layers ", model.layers(), " --heads ",
      model.heads(), " --seq ", model.seq(), " --dropout ", model.dropout(),
      " --seed ", flags_.seed, " --held_out ", flags_.held_out, " --steps ",
      flags_.steps, " --after ", flags_.after,
      flags_.save.empty() ? "" : " --save",
      flags_.resume.empty() ? "" : " --resume",
      flags_.chunked_loss ? " --chunked_loss" : "", ", data of ",
      text_.has_value() ? text_->num_tokens() : 0, " bytes");
}

absl::Status Trainer::MakeModel() {
  tessera::SeedAll(flags_.seed, world_);  // dropout differs between ranks
  model_ = Gpt(flags_.model);
  device_ = world_.device();
  for (const auto& parameter : model_->parameters()) {
    parameter_count_ += parameter.numel();
  }
  tessera::EngineOptions options;
  options.device = device_;
  options.planned_loss = [this](int64_t samples) {
    const at::Tensor tokens =
        at::zeros({samples, flags_.model.seq()}, at::kLong);
    return Loss(tokens, tokens);
  };
  options.resume_from = flags_.resume;
  TESSERA_ASSIGN_OR_RETURN(engine_,
                           tessera::Engine::Create(model_, config_, options));
  config_ = engine_->config();  // including the values of "auto"
  engine_->monitor().SetTokensPerSample(flags_.model.seq());
  if (text_.has_value()) {
    TESSERA_ASSIGN_OR_RETURN(
        loader_,
        text_->Load(config_.train_micro_batch_size_per_gpu(),
                    engine_->data_rank(), engine_->data_world_size(), device_));
  }
  return absl::OkStatus();
}

at::Tensor Trainer::Loss(const at::Tensor& all, const at::Tensor& targets) {
  const at::Tensor tokens = tessera::DivideSequence(*model_, all, 1);
  if (!flags_.chunked_loss) return model_->loss(tokens, targets);
  return tessera::LinearCrossEntropy(model_->hidden(tokens),
                                     model_->head_weight(), targets);
}

absl::StatusOr<float> Trainer::Step() {
  TESSERA_ASSIGN_OR_RETURN(
      const at::Tensor sum,
      TrainStep(engine_.get(), loader_.get(), [&](const TokenBatch& batch) {
        return Loss(batch.tokens, batch.targets);
      }));
  at::Tensor total = sum.reshape({1});
  TESSERA_RETURN_IF_ERROR(
      world_.communicator()->AllReduceSum(total, {"the loss"}).Wait());
  return total.item<float>() /
         static_cast<float>(config_.gradient_accumulation_steps() *
                            world_.world_size());
}

absl::StatusOr<float> Trainer::HeldOutLoss() {
  tessera::Mean loss("held_out_loss");
  tessera::EvaluateOptions options;
  options.one_thread = true;  // sums depend on them
  TESSERA_RETURN_IF_ERROR(tessera::Evaluate(
      engine_.get(), {&loss}, flags_.held_out,
      [&](absl::Span<const int64_t> samples) -> absl::Status {
        TESSERA_ASSIGN_OR_RETURN(const at::Tensor sample,
                                 text_->HeldOut(samples[0]));
        const TokenBatch batch(sample.to(device_));
        TESSERA_ASSIGN_OR_RETURN(const at::Tensor of_batch,
                                 engine_->EvalBatch([&] {
                                   return Loss(batch.tokens, batch.targets);
                                 }));
        loss.Add(of_batch);
        return absl::OkStatus();
      },
      options));
  return static_cast<float>(loss.value());
}

std::string Trainer::Sample() {
  const tessera::EvalScope evaluation(engine_.get());
  const std::vector<int64_t> tokens = Generate(
      [&](const at::Tensor& seen) {
        return engine_
            ->EvalBatch([&] {
              const tessera::Engine::AutocastScope autocast(engine_.get());
              return model_->forward(seen.to(device_));
            })
            .value();
      },
      TokensOf(flags_.prompt.empty() ? "\n" : flags_.prompt), flags_.sample);
  return TextOf(tokens);
}

// A checkpoint also holds what the program adds: the heads, which parameters do
// not show, and the place in the data.
absl::Status Trainer::Save(const std::string& dir) {
  tessera::ClientParts parts = {{"heads", absl::StrCat(flags_.model.heads())}};
  if (loader_ != nullptr) parts["data"] = loader_->State();
  return engine_->SaveCheckpoint(dir, tessera::PackClientState(parts));
}

absl::Status Trainer::Resume(const std::string& dir) {
  TESSERA_ASSIGN_OR_RETURN(const tessera::LoadCheckpointReport report,
                           engine_->LoadCheckpoint(dir));
  const auto resume = [&] {
    TESSERA_ASSIGN_OR_RETURN(const std::string heads,
                             tessera::ClientPart(report.client_state, "heads"));
    if (heads != absl::StrCat(flags_.model.heads())) {
      return absl::FailedPreconditionError(
          absl::StrCat("saved with --heads ", heads, ", but --heads is ",
                       flags_.model.heads()));
    }
    if (loader_ == nullptr) return absl::OkStatus();
    TESSERA_ASSIGN_OR_RETURN(const std::string place,
                             tessera::ClientPart(report.client_state, "data"));
    return loader_->Load(place);
  };
  return world_.communicator()->AgreeOk(tessera::Annotate(resume(), dir),
                                        "resuming");
}

int64_t Trainer::tokens_per_step() const {
  return config_.train_batch_size() * flags_.model.seq();
}

std::string Trainer::Describe() const {
  const GptOptions& model = flags_.model;
  const int ranks = world_.world_size(), threads = at::get_num_threads();
  return absl::StrFormat(
      "GPT of %.2f M parameters (%d layer%s, width %d, %d bytes of context)\n"
      "ZeRO stage %d, %d rank%s%s%s, %d thread%s each, %d bytes of text a "
      "step\n",
      parameter_count_ / 1e6, model.layers(), Plural(model.layers()),
      model.dim(), model.seq(), engine_->stage(), ranks, Plural(ranks),
      ranks == 1 ? ""
                 : absl::StrCat(" over ", world_.communicator()->backend()),
      device_.is_cpu() ? "" : absl::StrCat(" on ", device_.str()), threads,
      Plural(threads), tokens_per_step());
}
