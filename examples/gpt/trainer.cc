#include "examples/gpt/trainer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "ATen/Context.h"
#include "ATen/Functions.h"
#include "ATen/Parallel.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "c10/core/GradMode.h"

namespace {

const char* Plural(int64_t count) { return count == 1 ? "" : "s"; }

}  // namespace

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(
    const TrainFlags& flags, const tessera::World& world) {
  auto trainer = std::unique_ptr<Trainer>(new Trainer(flags, world));
  // What may fail on one rank alone comes first, and is agreed on, so that no
  // rank waits for one that has ended.
  TESSERA_RETURN_IF_ERROR(
      world.communicator()->AgreeOk(trainer->PrepareData(), "set-up"));
  TESSERA_RETURN_IF_ERROR(world.communicator()->AgreeEqual(
      trainer->Agreed(), "model, data or steps (by flags)"));
  TESSERA_RETURN_IF_ERROR(trainer->MakeModel());
  return trainer;
}

absl::Status Trainer::PrepareData() {
  const int ranks =
      world_.plan_world() > 0 ? world_.plan_world() : world_.world_size();
  TESSERA_ASSIGN_OR_RETURN(
      config_,
      tessera::LoadConfig(flags_.config, ranks, {}, flags_.ignore_unknown));
  if (flags_.stage >= 0) {
    config_.mutable_zero_optimization()->set_stage(
        static_cast<int32_t>(flags_.stage));
  }
  if (!flags_.dtype.empty()) {
    config_.mutable_bf16()->set_enabled(flags_.dtype == "bf16");
    config_.mutable_fp16()->set_enabled(flags_.dtype == "fp16");
  }
  if (flags_.data.empty()) return absl::OkStatus();
  const int64_t seq = flags_.model.seq();
  TESSERA_ASSIGN_OR_RETURN(corpus_,
                           tessera::ByteCorpus::Open(flags_.data, seq + 1));
  tessera::DistributedSamplerOptions options;
  if (trained_samples() < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--held_out: expected less than ", corpus_->num_samples(seq),
        ", the samples in ", flags_.data, "; got ", flags_.held_out));
  }
  options.num_samples = trained_samples();
  options.rank = world_.rank();
  options.world_size = world_.world_size();
  options.seed = flags_.seed;
  TESSERA_ASSIGN_OR_RETURN(sampler_,
                           tessera::DistributedSampler::Create(options));
  return absl::OkStatus();
}

// What no comparison of parameters would find.
std::string Trainer::Agreed() const {
  const GptOptions& model = flags_.model;
  return absl::StrCat(
      "--dim ", model.dim(), " --layers ", model.layers(), " --heads ",
      model.heads(), " --seq ", model.seq(), " --dropout ", model.dropout(),
      " --seed ", flags_.seed, " --held_out ", flags_.held_out, " --steps ",
      flags_.steps, " --after ", flags_.after,
      flags_.save.empty() ? "" : " --save",
      flags_.resume.empty() ? "" : " --resume", ", data of ",
      corpus_.has_value() ? corpus_->bytes().size() : 0, " bytes");
}

absl::Status Trainer::MakeModel() {
  at::manual_seed(flags_.seed);  // the same initial values on all ranks
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
    return model_->loss(tokens, tokens);
  };
  options.resume_from = flags_.resume;
  TESSERA_ASSIGN_OR_RETURN(engine_,
                           tessera::Engine::Create(model_, config_, options));
  config_ = engine_->config();  // with what "auto" has become
  at::manual_seed(flags_.seed + 1 + world_.rank());  // dropout differs
  return absl::OkStatus();
}

int64_t Trainer::trained_samples() const {
  return corpus_->num_samples(flags_.model.seq()) - flags_.held_out;
}

Trainer::Batch Trainer::MakeBatch(absl::Span<const int64_t> samples) const {
  const int64_t seq = flags_.model.seq();
  auto bytes =
      at::empty({static_cast<int64_t>(samples.size()), seq + 1}, at::kLong);
  auto* out = bytes.data_ptr<int64_t>();
  for (const int64_t index : samples) {
    const auto sample = corpus_->sample(index, seq);
    out = std::copy(sample.begin(), sample.end(), out);
  }
  bytes = bytes.to(device_);
  return {bytes.slice(1, 0, seq).contiguous(),
          bytes.slice(1, 1, seq + 1).contiguous()};
}

absl::StatusOr<float> Trainer::Step() {
  const int64_t micro_batches = config_.gradient_accumulation_steps();
  auto total = at::zeros({1}, at::TensorOptions().device(device_));
  for (int64_t i = 0; i < micro_batches; ++i) {
    const Batch batch = MakeBatch(
        sampler_->NextBatch(config_.train_micro_batch_size_per_gpu()));
    at::Tensor loss;
    {
      const tessera::Engine::AutocastScope autocast(engine_.get());
      loss = model_->loss(batch.tokens, batch.targets);
    }
    total += loss.detach();
    TESSERA_RETURN_IF_ERROR(engine_->Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine_->Step());
  }
  TESSERA_RETURN_IF_ERROR(
      world_.communicator()->AllReduceSum(total, {"the loss"}).Wait());
  return total.item<float>() /
         static_cast<float>(micro_batches * world_.world_size());
}

float Trainer::HeldOutLoss() {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);  // sums depend on them
  const c10::NoGradGuard no_gradients;
  model_->eval();
  double sum = 0;
  for (int64_t i = 0; i < flags_.held_out; ++i) {
    const Batch batch = MakeBatch({trained_samples() + i});
    const tessera::Engine::AutocastScope autocast(engine_.get());
    sum += model_->loss(batch.tokens, batch.targets).item<float>();
  }
  model_->train();
  at::set_num_threads(threads);
  return static_cast<float>(sum / static_cast<double>(flags_.held_out));
}

// "heads epoch position samples seed": the parameters do not show the heads;
// epoch and position are where to go on, with any number of ranks; the others
// tell whether it is the same data in the same order. Without data only the
// heads.
std::string Trainer::OwnState() const {
  const std::string heads = absl::StrCat(flags_.model.heads());
  if (!sampler_.has_value()) return heads;
  const tessera::SamplerState state = sampler_->state();
  return absl::StrCat(heads, " ", state.epoch, " ", state.position, " ",
                      trained_samples(), " ", flags_.seed);
}

absl::Status Trainer::Save(const std::string& dir) {
  return engine_->SaveCheckpoint(dir, OwnState());
}

absl::Status Trainer::Resume(const std::string& dir) {
  TESSERA_ASSIGN_OR_RETURN(const tessera::LoadCheckpointReport report,
                           engine_->LoadCheckpoint(dir));
  const std::string& saved = report.client_state;
  std::vector<std::string> parts = absl::StrSplit(saved, ' ');
  if (parts[0] != absl::StrCat(flags_.model.heads())) {
    return absl::FailedPreconditionError(
        absl::StrCat(dir, ": saved with --heads ", parts[0],
                     ", but --heads is ", flags_.model.heads()));
  }
  parts.erase(parts.begin());
  if (!sampler_.has_value()) return absl::OkStatus();
  tessera::SamplerState state;
  if (parts.size() != 4 || !absl::SimpleAtoi(parts[0], &state.epoch) ||
      !absl::SimpleAtoi(parts[1], &state.position)) {
    return absl::DataLossError(absl::StrCat(
        dir, ": expected this program's place in the data, got '", saved, "'"));
  }
  const std::string samples = absl::StrCat(trained_samples());
  const std::string seed = absl::StrCat(flags_.seed);
  if (parts[2] != samples || parts[3] != seed) {
    return absl::FailedPreconditionError(
        absl::StrCat(dir, ": saved with ", parts[2], " samples and --seed ",
                     parts[3], ", but ", flags_.data, " has ", samples,
                     " without those of ", "--held_out, and --seed is ", seed));
  }
  return tessera::Annotate(sampler_->Seek(state), dir);
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
