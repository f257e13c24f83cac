// A variant by the engine.
#include <torch/torch.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "engine/engine.h"
#include "tests/zoo/rig.h"

namespace tessera::zoo {
namespace {

proto::Config ConfigOf(absl::string_view way, const Recipe& recipe) {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  config.set_gradient_accumulation_steps(recipe.accumulation);
  config.set_gradient_clipping(recipe.clipping);
  proto::ZeroOptimization* zero = config.mutable_zero_optimization();
  zero->set_stage(way == "Stage2" ? 2 : 3);
  zero->set_stage3_param_persistence_threshold(0);
  // Its bits are this test's matter.
  config.mutable_activation_checkpointing()->set_check("never");
  if (way == "Stage3Gloo") zero->set_stage3_max_reuse_distance(0);
  config.mutable_optimizer()->set_type("AdamW");
  proto::OptimizerParams* params = config.mutable_optimizer()->mutable_params();
  params->set_lr(kRate);
  params->set_weight_decay(kWeightDecay);
  config.mutable_precision()->set_fp32_norms(recipe.fp32_norms);
  config.mutable_precision()->set_libtorch_exact(recipe.libtorch_exact);
  if (recipe.dtype == "bf16") config.mutable_bf16()->set_enabled(true);
  if (recipe.dtype == "fp16") {
    config.mutable_fp16()->set_enabled(true);
    config.mutable_fp16()->set_loss_scale(kLossScale);
  }
  if (!recipe.autocast.empty()) {
    config.mutable_torch_autocast()->set_enabled(true);
    config.mutable_torch_autocast()->set_dtype(recipe.autocast);
  }
  for (const std::string& name : recipe.ignored) {
    config.mutable_sharding()->add_ignored_parameters(name);
  }
  return config;
}

template <typename T>
T ValueOf(absl::StatusOr<T> value) {
  ThrowIfError(value.status());
  return *std::move(value);
}

class EngineTraining : public Training {
 public:
  explicit EngineTraining(std::unique_ptr<Engine> engine)
      : engine_(std::move(engine)) {}
  void Backward(const Tensor& loss, Loss options) override {
    BackwardOptions backward;
    backward.more_losses = options.more_losses;
    backward.retain_graph = options.retain_graph;
    ThrowIfError(engine_->Backward(loss, backward));
  }
  void Step() override { ThrowIfError(engine_->Step()); }
  void SetRate(double rate) override {
    ThrowIfError(engine_->SetLearningRate(rate));
  }
  Tensor UnderAutocast(const std::function<Tensor()>& forward) override {
    const Engine::AutocastScope autocast(engine_.get());
    return forward();
  }
  void Close() override { ThrowIfError(engine_->Close()); }

 private:
  const std::unique_ptr<Engine> engine_;
};

class EngineRig : public Rig {
 public:
  EngineRig(absl::string_view way, std::shared_ptr<Communicator> comm)
      : Rig(comm->rank(), /*plain=*/false), way_(way), comm_(std::move(comm)) {
    SetPoisonOnFree(way_ == "Stage3Gloo");
  }
  ~EngineRig() override { SetPoisonOnFree(false); }

 private:
  std::unique_ptr<Training> Make(std::shared_ptr<nn::Module> module,
                                 const Recipe& recipe) override {
    EngineOptions options;
    options.communicator = comm_;
    if (way_ == "Stage3Recompute") {
      options.is_recomputed = [](const nn::Module&, absl::string_view path) {
        return !path.empty();  // the outermost: the module's children
      };
    }
    return std::make_unique<EngineTraining>(ValueOf(
        Engine::Create(std::move(module), ConfigOf(way_, recipe), options)));
  }

  const std::string way_;
  const std::shared_ptr<Communicator> comm_;
};

}  // namespace

std::vector<std::string> Ways() {
  return {"Stage3", "Stage2", "Stage3Gloo", "Stage3Recompute"};
}

std::string BackendOf(absl::string_view way) {
  return way == "Stage3Gloo" ? "gloo" : "shm";
}

std::unique_ptr<Rig> MakeEngineRig(absl::string_view way,
                                   std::shared_ptr<Communicator> comm) {
  return std::make_unique<EngineRig>(way, std::move(comm));
}

}  // namespace tessera::zoo
