// Measures what the engine costs on the host, against plain libtorch in the
// same run:
//
//   bazel-bin/benchmarks/host_cost --rounds 31 --blocks 24 --dim 64
//     [--only 'stage 0']
//
//   linear   one forward of an 8 x 8 linear whose parameters an engine owns,
//            whole at stage 3, without and with a graph
//   allocation  a block of libtorch's CPU allocator, and its end; plain is the
//            allocator itself, engine the counted one
//   divided  an operator of an 8 x 8 tensor; engine: one that is divided, in a
//            group of one rank
//   step     forward, Backward and Step of many small blocks, a unit each, at
//            world size 1; plain is backward() and one at::_fused_adamw_ over
//            all parameters. Stage 0; stage 3 with its defaults (but no
//            parameter persists, which all of these would), with every unit
//            freed between forward and backward, and with every unit freed
//            after each operator
//
// Rounds of plain and engine are interleaved. It prints one line of JSON for
// each figure: medians over rounds in us, of the rounds' ratios, and of their
// differences divided by the number of units; by wall-clock time and, with
// cpu_, by the process's processor time. benchmarks/host_instructions counts
// instructions instead, by --count, which runs every figure once.
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "benchmarks/plain_training.h"
#include "benchmarks/program.h"
#include "c10/core/CPUAllocator.h"
#include "comm/group/self_communicator.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "parallel/tensor/part_group.h"
#include "parallel/tensor/placed.h"
#include "verify/plain/plain_autograd.h"

ABSL_FLAG(int, rounds, 31, "Rounds that are measured.");
ABSL_FLAG(int64_t, blocks, 24, "Blocks of the model that is stepped.");
ABSL_FLAG(int64_t, dim, 64, "Their width.");
ABSL_FLAG(int64_t, linears, 2000, "Calls of the linear in a round.");
ABSL_FLAG(std::string, only, "", "Figures whose names contain this.");
ABSL_FLAG(bool, count, false,
          "Run every figure once, for benchmarks/host_instructions.");

namespace tessera {
namespace {

// ---- what is measured

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

using Body = std::function<absl::Status()>;

struct Figure {
  std::string name;
  Body plain, engine;
  int64_t calls = 1;  // how often a body does what is measured
  int64_t units = 0;  // to divide the difference by; 0: do not divide
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

absl::Status AddLinears(std::vector<Figure>* figures) {
  const auto plain = std::make_shared<torch::nn::LinearImpl>(8, 8);
  const auto owned = std::make_shared<torch::nn::LinearImpl>(8, 8);
  proto::Config config;
  config.mutable_zero_optimization()->set_stage(3);
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<Engine> engine,
                           MakeEngine(owned, config));
  for (const bool graph : {false, true}) {
    Figure figure;
    figure.name = graph ? "linear, graph" : "linear, no graph";
    figure.plain = Linears(plain, graph, absl::GetFlag(FLAGS_linears));
    figure.engine =
        [engine, body = Linears(owned, graph, absl::GetFlag(FLAGS_linears))] {
          return body();
        };
    figure.calls = absl::GetFlag(FLAGS_linears);
    figures->push_back(std::move(figure));
  }
  return absl::OkStatus();
}

// The step's peak is above these blocks, as it is above most of a step's.
void AddAllocations(std::vector<Figure>* figures) {
  const auto body = [](c10::Allocator* allocator) {
    return [allocator] {
      for (int64_t i = 0; i < absl::GetFlag(FLAGS_linears); ++i) {
        const c10::DataPtr block = allocator->allocate(4096);
      }
      return absl::OkStatus();
    };
  };
  Figure figure;
  figure.name = "allocation";
  figure.plain = body(c10::GetDefaultCPUAllocator());
  figure.engine = body(c10::GetCPUAllocator());
  figure.calls = absl::GetFlag(FLAGS_linears);
  figures->push_back(std::move(figure));
}

void AddDivided(std::vector<Figure>* figures) {
  using Operator = at::Tensor (*)(const at::Tensor&);
  const std::pair<const char*, Operator> operators[] = {
      {"product", [](const at::Tensor& x) { return x * x; }},
      {"view",
       [](const at::Tensor& x) {
         return x.view({4, 2, 8});
       }},
      {"transpose", [](const at::Tensor& x) { return x.transpose(0, 1); }},
      {"matmul", [](const at::Tensor& x) {
         static const at::Tensor weight = torch::ones({8, 8});
         return at::matmul(x, weight);
       }}};
  const auto group = std::make_shared<PartGroup>(MakeSelfCommunicator());
  for (const auto& [name, run] : operators) {
    for (const bool graph : {false, true}) {
      const auto body = [graph, run = run](const at::Tensor& x) {
        return [graph, run, x] {
          torch::AutoGradMode mode(graph);
          for (int64_t i = 0; i < absl::GetFlag(FLAGS_linears); ++i) run(x);
          return absl::OkStatus();
        };
      };
      Figure figure;
      figure.name =
          absl::StrCat("divided, ", name, graph ? ", graph" : ", no graph");
      at::Tensor x = torch::ones({8, 8});
      x.set_requires_grad(graph);
      figure.plain = body(x);
      figure.engine = body(Place(x, TensorPlacement::Shard(0), group));
      figure.calls = absl::GetFlag(FLAGS_linears);
      figures->push_back(std::move(figure));
    }
  }
}

absl::Status AddStep(const std::string& name, const proto::Config& config,
                     std::vector<Figure>* figures) {
  const auto model = std::make_shared<Blocks>(absl::GetFlag(FLAGS_blocks),
                                              absl::GetFlag(FLAGS_dim));
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<Engine> engine,
                           MakeEngine(model, config));
  Figure figure;
  figure.name = name;
  const auto plain = std::make_shared<PlainBlocks>(std::make_shared<Blocks>(
      absl::GetFlag(FLAGS_blocks), absl::GetFlag(FLAGS_dim)));
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

absl::Status AddSteps(std::vector<Figure>* figures) {
  proto::Config config;
  auto* zero = config.mutable_zero_optimization();
  zero->set_stage(0);
  TESSERA_RETURN_IF_ERROR(AddStep("step, stage 0", config, figures));
  zero->set_stage(3);
  TESSERA_RETURN_IF_ERROR(AddStep("step, stage 3", config, figures));
  // Recompute the blocks: this includes all that their forward costs, since
  // every operator is followed, and the cost of computing it again.
  config.mutable_activation_checkpointing()->add_units("Block");
  TESSERA_RETURN_IF_ERROR(
      AddStep("step, stage 3, recomputed", config, figures));
  config.mutable_activation_checkpointing()->set_budget_bytes(1 << 30);
  TESSERA_RETURN_IF_ERROR(
      AddStep("step, stage 3, followed, all kept", config, figures));
  config.clear_activation_checkpointing();
  zero->set_stage3_max_reuse_distance(0);
  TESSERA_RETURN_IF_ERROR(
      AddStep("step, stage 3, freed after forward", config, figures));
  zero->set_stage3_max_live_parameters(0);
  return AddStep("step, stage 3, freed after each operator", config, figures);
}

struct Round {
  Times plain, engine;
};

absl::StatusOr<Round> RunRound(const Figure& figure, bool plain_first) {
  Round round;
  for (const bool plain : {plain_first, !plain_first}) {
    if (plain) {
      PlainAutograd plain_autograd;
      TESSERA_ASSIGN_OR_RETURN(round.plain, TimesOf(figure.plain));
    } else {
      TESSERA_ASSIGN_OR_RETURN(round.engine, TimesOf(figure.engine));
    }
  }
  return round;
}

// Returns the median over rounds of f(round).
template <typename F>
double MedianOf(const std::vector<Round>& rounds, F&& f) {
  std::vector<double> values;
  for (const Round& round : rounds) values.push_back(f(round));
  return Median(std::move(values));
}

void Print(const Figure& figure, const std::vector<Round>& rounds) {
  const auto calls = static_cast<double>(figure.calls);
  const auto units = static_cast<double>(figure.units);
  std::printf("{\"figure\": \"%s\"", figure.name.c_str());
  for (double Times::*const clock : {&Times::wall, &Times::cpu}) {
    const char* const prefix = clock == &Times::wall ? "" : "cpu_";
    std::printf(
        ", \"%splain_us\": %.3f, \"%sengine_us\": %.3f, \"%sratio\": %.3f",
        prefix,
        MedianOf(rounds,
                 [&](const Round& r) { return 1e6 * r.plain.*clock / calls; }),
        prefix,
        MedianOf(rounds,
                 [&](const Round& r) { return 1e6 * r.engine.*clock / calls; }),
        prefix, MedianOf(rounds, [&](const Round& r) {
          return r.engine.*clock / r.plain.*clock;
        }));
    if (figure.units == 0) continue;
    std::printf(", \"%sus_per_unit\": %.1f", prefix,
                MedianOf(rounds, [&](const Round& r) {
                  return 1e6 * (r.engine.*clock - r.plain.*clock) / units;
                }));
  }
  std::printf("}\n");
}

absl::Status Measure(const std::vector<Figure>& figures) {
  std::vector<std::vector<Round>> rounds(figures.size());
  for (int round = 0; round < absl::GetFlag(FLAGS_rounds) + 3; ++round) {
    for (size_t i = 0; i < figures.size(); ++i) {
      TESSERA_ASSIGN_OR_RETURN(const Round times,
                               RunRound(figures[i], round % 2 == 0));
      // The first rounds touch memory and fill records.
      if (round >= 3) rounds[i].push_back(times);
    }
  }
  for (size_t i = 0; i < figures.size(); ++i) Print(figures[i], rounds[i]);
  return absl::OkStatus();
}

// callgrind collects in this function, and writes the result after it; see
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
  absl::SetProgramUsageMessage("measures what the engine costs on the host");
  TESSERA_RETURN_IF_ERROR(ReadFlags(argc, argv));
  TESSERA_RETURN_IF_ERROR(
      AtLeast(1, FLAGS_rounds, FLAGS_blocks, FLAGS_dim, FLAGS_linears));
  at::set_num_threads(1);
  std::vector<Figure> figures;
  TESSERA_RETURN_IF_ERROR(AddLinears(&figures));
  AddAllocations(&figures);  // an engine lives: they are counted
  AddDivided(&figures);
  TESSERA_RETURN_IF_ERROR(AddSteps(&figures));
  const std::string only = absl::GetFlag(FLAGS_only);
  figures.erase(std::remove_if(figures.begin(), figures.end(),
                               [&](const Figure& figure) {
                                 return !absl::StrContains(figure.name, only);
                               }),
                figures.end());
  return absl::GetFlag(FLAGS_count) ? Count(figures) : Measure(figures);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::EndOf("host_cost", tessera::CatchTorch("libtorch", [&] {
                          return tessera::Run(argc, argv);
                        }));
}
