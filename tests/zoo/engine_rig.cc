// Runs a variant with the engine.
#include <torch/torch.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "sharding/recompute/checkpointed/checkpointed.h"
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
  void Step() override {
    ThrowIfError(engine_->Step());
    const RecomputeReport& report = engine_->last_step().recompute;
    given_up_ += report.given_up;
    unable_ = report.unable;
  }
  void SetRate(double rate) override {
    ThrowIfError(engine_->SetLearningRate(rate));
  }
  Tensor UnderAutocast(const std::function<Tensor()>& forward) override {
    const Engine::AutocastScope autocast(engine_.get());
    return forward();
  }
  void Close() override { ThrowIfError(engine_->Close()); }

  int64_t given_up() const { return given_up_; }  // modules, of all steps
  const std::vector<std::string>& unable() const { return unable_; }

 private:
  const std::unique_ptr<Engine> engine_;
  int64_t given_up_ = 0;
  std::vector<std::string> unable_;
};

// The data of a part, which are the same whenever it runs; those of a part
// within it come from there.
struct Draws {
  Draws* outer;
  std::shared_ptr<std::vector<Tensor>> known;
  size_t next = 0;

  static Tensor In(Draws* draws, const std::function<Tensor()>& draw) {
    if (draws == nullptr) return draw();
    std::vector<Tensor>& known = *draws->known;
    if (draws->next == known.size()) {
      known.push_back(In(draws->outer, draw).clone());
    }
    return known[draws->next++].clone();
  }
};

class EngineRig : public Rig {
 public:
  EngineRig(absl::string_view way, std::shared_ptr<Communicator> comm)
      : Rig(comm->rank(), /*plain=*/false), way_(way), comm_(std::move(comm)) {
    SetPoisonOnFree(way_ == "Stage3Gloo");
  }
  ~EngineRig() override { SetPoisonOnFree(false); }

  Tensor Part(const std::function<Tensor()>& part) override {
    if (way_ != "Stage3Checkpointed") return part();
    ++parts_;
    CheckpointOptions options;
    options.check = CheckpointOptions::Check::kAlways;
    const auto known = std::make_shared<std::vector<Tensor>>();
    return Checkpointed(options, [this, part, known] {
      ++runs_;
      Draws draws{draws_, known};
      const auto back = [this](Draws* of) { draws_ = of->outer; };
      const std::unique_ptr<Draws, decltype(back)> scope(draws_ = &draws, back);
      return part();
    });
  }
  Tensor Drawn(const std::function<Tensor()>& draw) override {
    return Draws::In(draws_, draw);
  }
  std::string Outcome() override {
    if (way_ == "Stage3Checkpointed" && runs_ == parts_) {
      return "nothing ran again";
    }
    if (way_ != "Stage3Recompute") return "";
    std::vector<std::string> unable;
    int64_t given_up = 0;
    for (const EngineTraining* training : trainings_) {
      given_up += training->given_up();
      for (const std::string& why : training->unable()) unable.push_back(why);
    }
    if (!unable.empty()) return absl::StrJoin(unable, "; ");
    return given_up == 0 ? "nothing was given up" : "";
  }

 private:
  std::unique_ptr<Training> Make(std::shared_ptr<nn::Module> module,
                                 const Recipe& recipe) override {
    EngineOptions options;
    options.communicator = comm_;
    if (way_ == "Stage3Recompute") {
      // The outermost modules are the module's children, or for a list its own.
      options.is_recomputed = [](const nn::Module& m, absl::string_view path) {
        return !path.empty() &&
               dynamic_cast<const nn::ModuleListImpl*>(&m) == nullptr;
      };
    }
    auto training = std::make_unique<EngineTraining>(ValueOf(
        Engine::Create(std::move(module), ConfigOf(way_, recipe), options)));
    trainings_.push_back(training.get());
    return training;
  }

  const std::string way_;
  const std::shared_ptr<Communicator> comm_;
  std::vector<const EngineTraining*> trainings_;  // the rig's
  int parts_ = 0, runs_ = 0;                      // of Part
  Draws* draws_ = nullptr;                        // of the part that runs
};

}  // namespace

std::vector<std::string> Ways() {
  return {"Stage3", "Stage2", "Stage3Gloo", "Stage3Recompute",
          "Stage3Checkpointed"};
}

std::string BackendOf(absl::string_view way) {
  return way == "Stage3Gloo" ? "gloo" : "shm";
}

std::unique_ptr<Rig> MakeEngineRig(absl::string_view way,
                                   std::shared_ptr<Communicator> comm) {
  return std::make_unique<EngineRig>(way, std::move(comm));
}

}  // namespace tessera::zoo
