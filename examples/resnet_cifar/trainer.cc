#include "examples/resnet_cifar/trainer.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "examples/resnet_cifar/augment.h"
#include "examples/resnet_cifar/batches.h"
#include "tessera/tessera.h"
#include "torch/torch.h"

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(
    const TrainFlags& flags, const tessera::StartedJob& job) {
  auto trainer = std::unique_ptr<Trainer>(new Trainer(flags, job));
  // Ranks agree on what may fail on one rank alone, so that no rank waits for
  // one that has ended.
  tessera::Communicator& ranks = job.comm();
  TESSERA_RETURN_IF_ERROR(ranks.AgreeOk(trainer->Prepare(), "set-up"));
  TESSERA_RETURN_IF_ERROR(ranks.AgreeEqual(
      absl::StrCat("--epochs ", flags.epochs, " --max_steps ", flags.max_steps,
                   " --seed ", flags.seed, " --augment ", flags.augment, ", ",
                   trainer->data_->train.num_images(), " and ",
                   trainer->data_->test.num_images(), " images"),
      "training or its data"));
  TESSERA_RETURN_IF_ERROR(trainer->MakeEngine());
  TESSERA_RETURN_IF_ERROR(trainer->MakeManager());
  return trainer;
}

absl::Status Trainer::Prepare() {
  if (config_.gradient_accumulation_steps() != 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        config_path_, ": this program takes a step for each batch: expected ",
        "gradient_accumulation_steps 1, got ",
        config_.gradient_accumulation_steps()));
  }
  if (config_.train_micro_batch_size_per_gpu() < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        config_path_, ": the rate depends on the steps of an epoch: expected ",
        "a batch size, got auto"));
  }
  TESSERA_ASSIGN_OR_RETURN(data_,
                           OpenCifar(flags_.data, flags_.images, flags_.seed));
  BatchOptions options;
  options.batch_size = config_.train_micro_batch_size_per_gpu();
  options.augment = flags_.augment;
  options.workers = flags_.workers;
  options.seed = flags_.seed;
  TESSERA_ASSIGN_OR_RETURN(loader_, LoadBatches(data_->train, world_, options));
  steps_ =
      flags_.epochs * StepsPerEpoch(data_->train.num_images(),
                                    world_.world_size(), options.batch_size);
  PlanRate();
  return absl::OkStatus();
}

// The rate goes up in a tenth of the steps at most, and then down to nearly 0
// in the last one.
void Trainer::PlanRate() {
  tessera::proto::Scheduler& scheduler = *config_.mutable_scheduler();
  int64_t down = steps_;
  if (scheduler.has_warmup()) {
    const int64_t up = std::min(scheduler.warmup().num_steps(), steps_ / 10);
    scheduler.mutable_warmup()->set_num_steps(up);
    down -= up;
  }
  scheduler.mutable_params()->set_t_max(down);
}

absl::Status Trainer::MakeEngine() {
  tessera::SeedAll(flags_.seed, world_);
  model_ = ResNet18(ResNetOptions().width(flags_.width));
  tessera::EngineOptions options;
  options.device = world_.device();
  options.planned_loss = [this](int64_t samples) {
    return torch::nn::functional::cross_entropy(
        model_->forward(at::zeros({samples, 3, kCifarSide, kCifarSide}))
            .to(at::kFloat),
        at::zeros({samples}, at::kLong));
  };
  TESSERA_ASSIGN_OR_RETURN(engine_,
                           tessera::Engine::Create(model_, config_, options));
  return absl::OkStatus();
}

absl::Status Trainer::MakeManager() {
  if (flags_.save.empty()) return absl::OkStatus();
  tessera::CheckpointManagerOptions options;
  options.dir = flags_.save;
  options.every = absl::Minutes(flags_.save_minutes);
  TESSERA_ASSIGN_OR_RETURN(
      manager_, tessera::CheckpointManager::Create(engine_.get(), options));
  if (!flags_.resume) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(const std::optional<std::string> state,
                           manager_->Resume());
  if (!state.has_value()) return absl::OkStatus();  // nothing is saved yet
  return world_.communicator()->AgreeOk(LoadClientState(*state), "resuming");
}

absl::Status Trainer::Train() {
  progress_.emplace(engine_.get(), tessera::ProgressOptions{.steps = steps_});
  bool ends = false;
  const auto done = [this] {
    return epoch_ >= flags_.epochs ||
           (flags_.max_steps > 0 && engine_->step() >= flags_.max_steps);
  };
  while (!ends && !done()) {
    TESSERA_RETURN_IF_ERROR(Step());
    if (manager_ != nullptr) {
      TESSERA_ASSIGN_OR_RETURN(
          ends, manager_->MaybeSave([this] { return ClientState(); }));
    }
  }
  if (manager_ != nullptr) {
    TESSERA_RETURN_IF_ERROR(manager_->Finish([this] { return ClientState(); }));
  }
  return engine_->Close();
}

absl::Status Trainer::Step() {
  TESSERA_ASSIGN_OR_RETURN(const tessera::Batch batch,
                           loader_->NextOnAll(*world_.communicator()));
  const at::Tensor &images = batch.tensors[0], &labels = batch.tensors[1];
  at::Tensor logits;
  {
    const tessera::Engine::AutocastScope autocast(engine_.get());
    logits = model_->forward(images);
  }
  const at::Tensor loss =
      torch::nn::functional::cross_entropy(logits.to(at::kFloat), labels);
  TESSERA_RETURN_IF_ERROR(engine_->Backward(loss));
  TESSERA_RETURN_IF_ERROR(engine_->Step());
  seen_.Add(logits, labels);
  TESSERA_RETURN_IF_ERROR(progress_->Show(loss));
  return batch.ends_epoch ? EndEpoch() : absl::OkStatus();
}

absl::Status Trainer::EndEpoch() {
  ++epoch_;
  TESSERA_RETURN_IF_ERROR(
      tessera::ReduceMetrics(world_.communicator().get(), seen_.metrics()));
  tessera::EvaluateOptions options;
  options.batch_size = config_.train_micro_batch_size_per_gpu();
  Score test;
  TESSERA_RETURN_IF_ERROR(tessera::Evaluate(
      engine_.get(), test.metrics(), data_->test.num_images(),
      [&](absl::Span<const int64_t> samples) {
        const auto [images, labels] =
            ImagesOf(data_->test, samples, WholeImage);
        test.Add(model_->forward(images.to(world_.device())),
                 labels.to(world_.device()));
        return absl::OkStatus();
      },
      options));
  SayEpoch(seen_, test);
  for (tessera::Metric* metric : seen_.metrics()) metric->Reset();
  return absl::OkStatus();
}

void Trainer::SayEpoch(const Score& train, const Score& test) {
  progress_->Say(absl::StrFormat(
      "epoch %d/%d step %d rate %.5f: loss %.4f, accuracy %.2f %%; test: loss "
      "%.4f, accuracy %.2f %%",
      epoch_, flags_.epochs, engine_->step(),
      engine_->last_step().learning_rate, train.loss.value(),
      100 * train.accuracy.value(), test.loss.value(),
      100 * test.accuracy.value()));
}

// Returns what this program adds to a checkpoint, for each rank.
std::string Trainer::ClientState() const {
  return tessera::PackClientState({{"loader", loader_->State()},
                                   {"epoch", absl::StrCat(epoch_)},
                                   {"ranks", absl::StrCat(world_.world_size())},
                                   {"loss", seen_.loss.State()},
                                   {"accuracy", seen_.accuracy.State()}});
}

absl::Status Trainer::LoadClientState(const std::string& state) {
  TESSERA_ASSIGN_OR_RETURN(tessera::ClientParts parts,
                           tessera::UnpackClientState(state));
  if (!absl::SimpleAtoi(parts["epoch"], &epoch_)) {
    return absl::DataLossError(
        absl::StrCat("expected a number of epochs, got '", parts["epoch"],
                     "'; was it saved by this program?"));
  }
  // The sums apply to the same number of ranks; others begin the rest of the
  // epoch without.
  if (parts["ranks"] == absl::StrCat(world_.world_size())) {
    TESSERA_RETURN_IF_ERROR(seen_.loss.Load(parts["loss"]));
    TESSERA_RETURN_IF_ERROR(seen_.accuracy.Load(parts["accuracy"]));
  }
  return loader_->Load(parts["loader"]);
}
