// What the engine costs on the host, against plain libtorch in the same run:
//
//   bazel-bin/benchmarks/host_cost --rounds 31 --blocks 24 --dim 64
//     [--only 'stage 0']
//
//   linear   one forward of an 8 x 8 linear whose parameters an engine owns,
//            whole at stage 3, without and with a graph
//   step     forward, Backward and Step of many small blocks, a unit each, at
//            world size 1; plain is backward() and one at::_fused_adamw_ over
//            all parameters. Stage 0; stage 3 with its defaults (but no
//            parameter persists, which all of these would), with every unit
//            freed between forward and backward, and with every unit freed
//            after each operator
//
// Rounds of plain and engine are interleaved. Printed is, per figure, one line
// of JSON: medians over rounds in us, the median of the rounds' ratios, and the
// median of their differences by units. benchmarks/host_instructions counts
// instructions instead of time, by --count, which runs every figure once.
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/self_communicator.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "torch/csrc/autograd/engine.h"

namespace tessera {
namespace {

constexpr double kLr = 1e-3, kWeightDecay = 0.1;
constexpr int64_t kTokens = 8;

struct Flags {
  int rounds = 31;
  int64_t blocks = 24, dim = 64;
  int64_t linears = 2000;  // in a round
  std::string only;        // figures whose names contain it
  bool count = false;
};

absl::StatusOr<Flags> ParseFlags(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    std::vector<std::string> parts =
        absl::StrSplit(argv[i], absl::MaxSplits('=', 1));
    if (parts[0] == "--count") {
      flags.count = true;
      continue;
    }
    if (parts.size() < 2 && i + 1 < argc) parts.push_back(argv[++i]);
    parts.resize(2);
    if (parts[0] == "--only") {
      flags.only = parts[1];
      continue;
    }
    int64_t value = 0;
    const bool good = absl::SimpleAtoi(parts[1], &value) && value > 0;
    if (good && parts[0] == "--rounds") {
      flags.rounds = static_cast<int>(value);
    } else if (good && parts[0] == "--blocks") {
      flags.blocks = value;
    } else if (good && parts[0] == "--dim") {
      flags.dim = value;
    } else if (good && parts[0] == "--linears") {
      flags.linears = value;
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("cannot read '", parts[0], " ", parts[1], "'"));
    }
  }
  return flags;
}

// ---- what is run

// A block of a transformer: 12 parameters.
struct Block : torch::nn::Module {
  explicit Block(int64_t dim)
      : norm1(register_module("norm1", Norm(dim))),
        qkv(register_module("qkv", torch::nn::Linear(dim, 3 * dim))),
        proj(register_module("proj", torch::nn::Linear(dim, dim))),
        norm2(register_module("norm2", Norm(dim))),
        up(register_module("up", torch::nn::Linear(dim, 4 * dim))),
        down(register_module("down", torch::nn::Linear(4 * dim, dim))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto qkv_of_x = qkv(norm1(x)).chunk(3, -1);
    const at::Tensor attention =
        torch::softmax(qkv_of_x[0].matmul(qkv_of_x[1].t()), -1);
    const at::Tensor y = x + proj(attention.matmul(qkv_of_x[2]));
    return y + down(torch::gelu(up(norm2(y))));
  }
  static torch::nn::LayerNorm Norm(int64_t dim) {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim}));
  }
  torch::nn::LayerNorm norm1;
  torch::nn::Linear qkv, proj;
  torch::nn::LayerNorm norm2;
  torch::nn::Linear up, down;
};

struct Blocks : torch::nn::Module {
  explicit Blocks(const Flags& flags) {
    torch::manual_seed(1);
    for (int64_t i = 0; i < flags.blocks; ++i) {
      blocks.push_back(register_module(absl::StrCat("block", i),
                                       std::make_shared<Block>(flags.dim)));
    }
    input = torch::randn({kTokens, flags.dim});
  }
  at::Tensor Loss() {
    at::Tensor x = input;
    for (const auto& block : blocks) x = block->forward(x);
    return x.square().mean();
  }
  std::vector<std::shared_ptr<Block>> blocks;
  at::Tensor input;
};

// While it lives, libtorch's own autograd engine, without the hooks of ours.
class PlainAutograd {
 public:
  PlainAutograd() {
    Ours() = &torch::autograd::Engine::get_default_engine();
    torch::autograd::set_default_engine_stub(
        &torch::autograd::Engine::get_base_engine);
  }
  ~PlainAutograd() {
    torch::autograd::set_default_engine_stub(
        []() -> torch::autograd::Engine& { return *Ours(); });
  }
  PlainAutograd(const PlainAutograd&) = delete;
  PlainAutograd& operator=(const PlainAutograd&) = delete;

 private:
  static torch::autograd::Engine*& Ours() {
    static torch::autograd::Engine* engine = nullptr;
    return engine;
  }
};

// Plain libtorch's training, as torch.optim.AdamW(fused=True) does it.
class PlainTraining {
 public:
  explicit PlainTraining(std::shared_ptr<Blocks> model)
      : model_(std::move(model)), parameters_(model_->parameters()) {
    for (const at::Tensor& p : parameters_) {
      exp_avgs_.push_back(torch::zeros_like(p));
      exp_avg_sqs_.push_back(torch::zeros_like(p));
      steps_.push_back(torch::zeros({}));
    }
  }

  void Step() {
    model_->Loss().backward();
    torch::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& p : parameters_) gradients.push_back(p.grad());
    at::_foreach_add_(steps_, 1);
    at::_fused_adamw_(parameters_, gradients, exp_avgs_, exp_avg_sqs_, {},
                      steps_, kLr, 0.9, 0.999, kWeightDecay, 1e-8,
                      /*amsgrad=*/false, /*maximize=*/false);
    for (at::Tensor& p : parameters_) p.mutable_grad().reset();
  }

 private:
  std::shared_ptr<Blocks> model_;
  std::vector<at::Tensor> parameters_, exp_avgs_, exp_avg_sqs_, steps_;
};

absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(
    std::shared_ptr<torch::nn::Module> module, proto::Config config) {
  config.set_train_micro_batch_size_per_gpu(1);
  config.set_gradient_clipping(0);
  config.mutable_zero_optimization()->set_stage3_param_persistence_threshold(0);
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_optimizer()->mutable_params()->set_lr(kLr);
  config.mutable_optimizer()->mutable_params()->set_weight_decay(kWeightDecay);
  EngineOptions options;
  options.communicator = MakeSelfCommunicator();
  return Engine::Create(std::move(module), config, options);
}

// ---- what is measured

using Body = std::function<absl::Status()>;

struct Figure {
  std::string name;
  Body plain, engine;
  int64_t calls = 1;  // that a body makes of what is measured
  int64_t units = 0;  // to divide the difference by; 0: not of interest
};

Body Linears(std::shared_ptr<torch::nn::LinearImpl> linear, bool graph,
             int64_t calls) {
  at::Tensor x = torch::ones({8, 8});
  x.set_requires_grad(graph);
  return [linear, graph, calls, x] {
    torch::AutoGradMode mode(graph);
    for (int64_t i = 0; i < calls; ++i) linear->forward(x);
    return absl::OkStatus();
  };
}

absl::Status AddLinears(const Flags& flags, std::vector<Figure>* figures) {
  const auto plain = std::make_shared<torch::nn::LinearImpl>(8, 8);
  const auto owned = std::make_shared<torch::nn::LinearImpl>(8, 8);
  proto::Config config;
  config.mutable_zero_optimization()->set_stage(3);
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<Engine> engine,
                           MakeEngine(owned, config));
  for (const bool graph : {false, true}) {
    Figure figure;
    figure.name = graph ? "linear, graph" : "linear, no graph";
    figure.plain = Linears(plain, graph, flags.linears);
    figure.engine = [engine, body = Linears(owned, graph, flags.linears)] {
      return body();
    };
    figure.calls = flags.linears;
    figures->push_back(std::move(figure));
  }
  return absl::OkStatus();
}

absl::Status AddStep(const Flags& flags, const std::string& name,
                     const proto::Config& config,
                     std::vector<Figure>* figures) {
  const auto model = std::make_shared<Blocks>(flags);
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<Engine> engine,
                           MakeEngine(model, config));
  Figure figure;
  figure.name = name;
  const auto plain =
      std::make_shared<PlainTraining>(std::make_shared<Blocks>(flags));
  figure.plain = [plain] {
    plain->Step();
    return absl::OkStatus();
  };
  figure.engine = [engine, model] {
    TESSERA_RETURN_IF_ERROR(engine->Backward(model->Loss()));
    return engine->Step();
  };
  figure.units = static_cast<int64_t>(engine->DescribeUnits().size());
  figures->push_back(std::move(figure));
  return absl::OkStatus();
}

absl::Status AddSteps(const Flags& flags, std::vector<Figure>* figures) {
  proto::Config config;
  auto* zero = config.mutable_zero_optimization();
  zero->set_stage(0);
  TESSERA_RETURN_IF_ERROR(AddStep(flags, "step, stage 0", config, figures));
  zero->set_stage(3);
  TESSERA_RETURN_IF_ERROR(AddStep(flags, "step, stage 3", config, figures));
  zero->set_stage3_max_reuse_distance(0);
  TESSERA_RETURN_IF_ERROR(
      AddStep(flags, "step, stage 3, freed after forward", config, figures));
  zero->set_stage3_max_live_parameters(0);
  return AddStep(flags, "step, stage 3, freed after each operator", config,
                 figures);
}

absl::StatusOr<double> Microseconds(const Body& body) {
  const absl::Time begin = absl::Now();
  TESSERA_RETURN_IF_ERROR(body());
  return absl::ToDoubleMicroseconds(absl::Now() - begin);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

absl::Status Measure(const Flags& flags, const std::vector<Figure>& figures) {
  struct Times {
    std::vector<double> plain, engine, ratio, difference;
  };
  std::vector<Times> times(figures.size());
  for (int round = 0; round < flags.rounds + 3; ++round) {
    for (size_t i = 0; i < figures.size(); ++i) {
      const auto calls = static_cast<double>(figures[i].calls);
      double plain = 0, engine = 0;
      {
        PlainAutograd plain_autograd;
        TESSERA_ASSIGN_OR_RETURN(plain, Microseconds(figures[i].plain));
      }
      TESSERA_ASSIGN_OR_RETURN(engine, Microseconds(figures[i].engine));
      if (round < 3) continue;  // the first touch memory, fill records
      times[i].plain.push_back(plain / calls);
      times[i].engine.push_back(engine / calls);
      times[i].ratio.push_back(engine / plain);
      times[i].difference.push_back((engine - plain) / calls);
    }
  }
  for (size_t i = 0; i < figures.size(); ++i) {
    std::printf(
        "{\"figure\": \"%s\", \"plain_us\": %.3f, \"engine_us\": %.3f, "
        "\"ratio\": %.3f",
        figures[i].name.c_str(), Median(times[i].plain),
        Median(times[i].engine), Median(times[i].ratio));
    if (figures[i].units > 0) {
      std::printf(
          ", \"units\": %lld, \"us_per_unit\": %.1f",
          static_cast<long long>(figures[i].units),
          Median(times[i].difference) / static_cast<double>(figures[i].units));
    }
    std::printf("}\n");
  }
  return absl::OkStatus();
}

// What callgrind collects, and after what it writes that down; see
// benchmarks/host_instructions. It does not do both for one function.
__attribute__((noinline)) absl::Status Collected(const Body& body) {
  absl::Status status = body();
  asm volatile("" ::: "memory");  // no tail call
  return status;
}
__attribute__((noinline)) absl::Status Dumped(const Body& body) {
  absl::Status status = Collected(body);
  asm volatile("" ::: "memory");
  return status;
}

absl::Status Count(const std::vector<Figure>& figures) {
  for (const Figure& figure : figures) {
    for (int i = 0; i < 3; ++i) {  // as Measure
      TESSERA_RETURN_IF_ERROR(figure.engine());
    }
    TESSERA_RETURN_IF_ERROR(Dumped(figure.engine));
    PlainAutograd plain_autograd;
    TESSERA_RETURN_IF_ERROR(figure.plain());
    TESSERA_RETURN_IF_ERROR(Dumped(figure.plain));
    std::printf("%lld %lld %s\n", static_cast<long long>(figure.calls),
                static_cast<long long>(figure.units), figure.name.c_str());
  }
  return absl::OkStatus();
}

absl::Status Run(int argc, char** argv) {
  TESSERA_ASSIGN_OR_RETURN(const Flags flags, ParseFlags(argc, argv));
  at::set_num_threads(1);
  std::vector<Figure> figures;
  TESSERA_RETURN_IF_ERROR(AddLinears(flags, &figures));
  TESSERA_RETURN_IF_ERROR(AddSteps(flags, &figures));
  figures.erase(std::remove_if(figures.begin(), figures.end(),
                               [&](const Figure& figure) {
                                 return !absl::StrContains(figure.name,
                                                           flags.only);
                               }),
                figures.end());
  return flags.count ? Count(figures) : Measure(flags, figures);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  const absl::Status status = tessera::CatchTorch(
      "host_cost", [&] { return tessera::Run(argc, argv); });
  if (status.ok()) return 0;
  std::fprintf(stderr, "host_cost: %s\n",
               std::string(status.message()).c_str());
  return 1;
}
