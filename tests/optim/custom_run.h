// Defines optimizers as a program would, and a run with one of them.
#ifndef TESTS_OPTIM_CUSTOM_RUN_H_
#define TESTS_OPTIM_CUSTOM_RUN_H_

#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optim/custom/torch_optimizer.h"
#include "tessera/tessera.h"
#include "tests/optim/optimizer_run.h"

namespace tessera {

// libtorch's AdamW, operator by operator.
inline CustomOptimizer OwnAdamW() {
  CustomOptimizer adamw;
  adamw.name = "own adamw";
  adamw.states = {"exp_avg", "exp_avg_sq"};
  adamw.step = [](const CustomStep& s) {
    const OptimizerOptions& o = s.options;
    const auto step = static_cast<double>(s.step);
    if (o.weight_decay != 0) s.master.mul_(1 - o.lr * o.weight_decay);
    s.states[0].mul_(o.beta1).add_(s.gradient, 1 - o.beta1);
    s.states[1].mul_(o.beta2).addcmul_(s.gradient, s.gradient, 1 - o.beta2);
    const at::Tensor denominator =
        s.states[1]
            .sqrt()
            .div(std::sqrt(1 - std::pow(o.beta2, step)))
            .add_(o.eps);
    s.master.addcdiv_(s.states[0], denominator,
                      -(o.lr / (1 - std::pow(o.beta1, step))));
    return absl::OkStatus();
  };
  return adamw;
}

// A class that is not libtorch's: its momentum decays as its steps grow.
class Fading : public torch::optim::Optimizer {
 public:
  struct Options : torch::optim::OptimizerCloneableOptions<Options> {
    double lr = 0.1;
    double get_lr() const override { return lr; }
    void set_lr(double rate) override { lr = rate; }
  };
  struct State : torch::optim::OptimizerCloneableParamState<State> {
    int64_t steps = 0;
    at::Tensor momentum;
  };

  explicit Fading(std::vector<at::Tensor> parameters)
      : Optimizer(std::move(parameters), std::make_unique<Options>()) {}

  at::Tensor step(LossClosure = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      for (at::Tensor& p : group.params()) {
        if (!p.grad().defined()) continue;
        auto& kept = state()[p.unsafeGetTensorImpl()];
        if (kept == nullptr) kept = std::make_unique<State>();
        State& state = static_cast<State&>(*kept);
        const auto decay = 1 - 1 / static_cast<double>(++state.steps);
        if (!state.momentum.defined()) state.momentum = at::zeros_like(p);
        state.momentum.mul_(decay).add_(p.grad());
        p.add_(state.momentum, -group.options().get_lr());
      }
    }
    return {};
  }
};

inline TorchStates FadingStates() {
  TorchStates states;
  states.names = {"momentum"};
  states.make = [](int64_t steps, const std::vector<at::Tensor>& tensors) {
    auto state = std::make_unique<Fading::State>();
    state->steps = steps;
    state->momentum = tensors[0];
    return state;
  };
  states.tensors = [](const torch::optim::OptimizerParamState& state) {
    return std::vector<at::Tensor>{
        static_cast<const Fading::State&>(state).momentum};
  };
  return states;
}

// Makes one of libtorch's optimizers over these parameters.
inline std::unique_ptr<torch::optim::Optimizer> MakePlain(
    const std::string& name, std::vector<at::Tensor> parameters) {
  namespace optim = torch::optim;
  if (name == "sgd") {
    return std::make_unique<optim::SGD>(
        std::move(parameters),
        optim::SGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.1));
  }
  if (name == "adagrad") {
    return std::make_unique<optim::Adagrad>(
        std::move(parameters),
        optim::AdagradOptions(0.1).initial_accumulator_value(0.5).lr_decay(
            0.1));
  }
  if (name == "rmsprop") {
    return std::make_unique<optim::RMSprop>(
        std::move(parameters),
        optim::RMSpropOptions(0.1).momentum(0.5).centered(true));
  }
  if (name == "adam") {
    return std::make_unique<optim::Adam>(
        std::move(parameters),
        optim::AdamOptions(0.1).amsgrad(true).weight_decay(0.1));
  }
  if (name == "adamw") {
    return std::make_unique<optim::AdamW>(
        std::move(parameters), optim::AdamWOptions(0.1).weight_decay(0.1));
  }
  return std::make_unique<Fading>(std::move(parameters));
}

// Returns OwnAdamW for "own", Fading with its own states for "fading", "bound",
// or else MakePlain's.
inline absl::StatusOr<CustomOptimizer> OptimizerOf(const std::string& name) {
  if (name == "own") return OwnAdamW();
  TorchFactory factory = [name](std::vector<at::Tensor> parameters) {
    return MakePlain(name, std::move(parameters));
  };
  if (name == "fading") return FromTorch(std::move(factory), name);
  if (name == "bound") {
    return FromTorch(std::move(factory), name, FadingStates());
  }
  return FromTorch(std::move(factory));
}

// These options differ between groups, and have a frozen group and averages.
inline constexpr char kManyOptions[] =
    "params { lr: 0.1 weight_decay: 0.1 ema_decay: 0.75 } no_decay: 'auto' "
    "param_groups { name: 'first' parameters: '*0*weight' gradient_clipping: "
    "0.01 params { lr: 0.01 betas: 0.5 betas: 0.9 } } "
    "param_groups { name: 'still' parameters: 'out.*' frozen: true }";

// Reads words, besides those of TrainWith (optimizer_run.h): own (OptimizerOf;
// exact: the engine's AdamW with precision.libtorch_exact), many
// (kManyOptions), clipping, schedule, set (SetOption before the second step),
// device.
inline TrainingSpec OwnSpecOf(const Words& words) {
  TrainingSpec spec;
  spec.device = words.Get("device");
  spec.stage = std::stoi(words.Get("stage", "0"));
  spec.dtype = words.Get("dtype", "fp32");
  spec.initial_scale_power = 30;  // the first steps are skipped
  spec.hysteresis = 1;
  spec.accumulation = std::stoi(words.Get("accumulation", "1"));
  spec.clipping = words.Get("clipping").empty() ? 0 : 0.01;
  if (!words.Get("offload").empty()) spec.states_on_disk = 1;
  spec.tier = words.Get("offload", "nvme");
  const std::string own = words.Get("own");
  spec.libtorch_exact = own == "exact";
  const bool reads_all = own == "own" || own == "exact";
  spec.optimizer =
      absl::StrCat(own == "exact" ? "type: 'AdamW' " : "type: 'Custom' ",
                   !words.Get("many").empty() ? kManyOptions
                   : reads_all ? "params { lr: 0.1 weight_decay: 0.1 }"
                               : "params { lr: 0.1 }");
  return spec;
}

inline proto::Config OwnConfigOf(const Words& words) {
  proto::Config config = ConfigOf(OwnSpecOf(words));
  if (!words.Get("schedule").empty()) {
    proto::Scheduler* const scheduler = config.mutable_scheduler();
    scheduler->set_type("WarmupLR");
    scheduler->mutable_params()->set_warmup_max_lr(0.1);
    scheduler->mutable_params()->set_warmup_num_steps(4);
  }
  return config;
}

inline absl::StatusOr<Trainee> MakeOwn(const Words& words, const World& world) {
  const TrainingSpec spec = OwnSpecOf(words);
  PrepareDevice(spec, world.rank());
  EngineOptions options;
  TESSERA_ASSIGN_OR_RETURN(options.communicator,
                           CommunicatorOf(spec, world.communicator()));
  if (!spec.device.empty()) {
    options.device = at::Device(at::kPrivateUse1, 1);
  }
  if (words.Get("own") != "exact") {
    TESSERA_ASSIGN_OR_RETURN(options.optimizer, OptimizerOf(words.Get("own")));
  }
  Trainee t;
  t.rank = world.rank();
  t.model = BuildModel("Mlp", world.rank());
  TESSERA_ASSIGN_OR_RETURN(
      t.engine, Engine::Create(t.model, OwnConfigOf(words), options));
  return t;
}

inline std::vector<std::string> Train(int world_size,
                                      const std::string& words) {
  return RunOnRanks(world_size, "TrainOwn", words);
}

}  // namespace tessera
#endif  // TESTS_OPTIM_CUSTOM_RUN_H_
