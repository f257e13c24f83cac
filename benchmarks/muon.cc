// Measures what a step of Muon takes beyond the same step of AdamW, against the
// matrix products that it cannot do without:
//
//   bazel run //benchmarks:muon -- --world 2 --rounds 15
//
//   step      of an engine of some GPT-like blocks, from a barrier to the next,
//             after a backward that is not measured
//   products  optim/matrix's Orthogonal of all of the step's matrices, one
//             after the other, by rank 0 alone in one thread
//   ratio     (step of Muon - step of AdamW) / (products / W): 1 if the rest of
//             the work, and what is sent, cost nothing and the matrices were
//             distributed evenly
//   cpu_ratio the ratio of the processor times of all ranks, which excludes
//             waits; steadier on a machine that others use
//
// Rounds of all are interleaved, in another order each time. Prints for each
// method one line of JSON: medians in ms, and the rounds' ratios with their
// median, the least and the largest.
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "benchmarks/plain_training.h"
#include "benchmarks/program.h"
#include "benchmarks/rank_program.h"
#include "optim/matrix/newton_schulz.h"
#include "tessera/tessera.h"

ABSL_FLAG(int64_t, layers, 6, "Blocks.");
ABSL_FLAG(int64_t, dim, 512, "Width of the model.");
ABSL_FLAG(int, stage, 3, "ZeRO stage, 0 to 3.");
ABSL_FLAG(int, rounds, 15, "Rounds that are measured, after one that is not.");
ABSL_FLAG(std::vector<std::string>, methods,
          (std::vector<std::string>{"standard", "gram"}), "ns_method, each.");

namespace tessera {
namespace {

struct Contestant {
  std::function<absl::Status()> prepare, run;
  std::vector<double> ms = {}, cpu_ms = {};  // each round's; all ranks' cpu
};

absl::StatusOr<Contestant> StepOf(const std::string& optimizer,
                                  const std::string& method) {
  const auto model = std::make_shared<Blocks>(absl::GetFlag(FLAGS_layers),
                                              absl::GetFlag(FLAGS_dim));
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  config.mutable_zero_optimization()->set_stage(absl::GetFlag(FLAGS_stage));
  config.mutable_optimizer()->set_type(optimizer);
  proto::OptimizerParams* const params =
      config.mutable_optimizer()->mutable_params();
  params->set_lr(kLr);
  params->set_weight_decay(kWeightDecay);
  if (!method.empty()) params->set_ns_method(method);
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<Engine> engine,
                           Engine::Create(model, config));
  return Contestant{[engine, model] { return engine->Backward(model->Loss()); },
                    [engine] {
                      TESSERA_RETURN_IF_ERROR(engine->Step());
                      (void)engine->last_step();
                      return absl::OkStatus();
                    }};
}

// Computes the products as the step does: optim/directed_step.cc.
Contestant ProductsOf(const std::string& method, bool mine) {
  NewtonSchulzOptions options;
  options.gram = method == "gram";
  options.dtype = options.gram ? at::kHalf : at::kBFloat16;
  std::vector<at::Tensor> matrices;
  const Blocks model(absl::GetFlag(FLAGS_layers), absl::GetFlag(FLAGS_dim));
  for (const at::Tensor& p : model.parameters()) {
    if (!mine || p.dim() < 2) continue;
    matrices.push_back(
        torch::randn(p.sizes()).to(options.gram ? at::kFloat : at::kBFloat16));
  }
  return {[] { return absl::OkStatus(); },
          [options, matrices] {
            for (const at::Tensor& m : matrices) Orthogonal(m, options);
            return absl::OkStatus();
          }};
}

absl::Status Measure(Communicator* comm, std::vector<Contestant>* all) {
  std::mt19937 random(1);  // the same order on all ranks
  std::vector<Contestant*> order;
  for (Contestant& c : *all) order.push_back(&c);
  for (int round = -1; round < absl::GetFlag(FLAGS_rounds); ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (Contestant* c : order) {
      TESSERA_RETURN_IF_ERROR(c->prepare());
      TESSERA_ASSIGN_OR_RETURN(const Times times, TimesOfRanks(comm, c->run));
      if (round < 0) continue;
      c->ms.push_back(times.wall * 1e3);
      c->cpu_ms.push_back(times.cpu * 1e3);
    }
  }
  return absl::OkStatus();
}

void Print(const std::string& method, int world, const Contestant& adamw,
           const Contestant& muon, const Contestant& products) {
  std::vector<double> ratios, cpu_ratios, extra;
  for (size_t i = 0; i < muon.ms.size(); ++i) {
    extra.push_back(muon.ms[i] - adamw.ms[i]);
    ratios.push_back(extra[i] * world / products.ms[i]);
    cpu_ratios.push_back((muon.cpu_ms[i] - adamw.cpu_ms[i]) /
                         products.cpu_ms[i]);
  }
  const auto [least, largest] =
      std::minmax_element(ratios.begin(), ratios.end());
  absl::PrintF(
      R"({"benchmark": "muon", "method": "%s", "world": %d, "stage": %d, )"
      R"("layers": %d, "dim": %d, "adamw_ms": %.2f, "muon_ms": %.2f, )"
      R"("extra_ms": %.2f, "products_ms": %.2f, "ratio": %.3f, )"
      R"("least": %.3f, "largest": %.3f, "cpu_ratio": %.3f, "rounds": [%s]})"
      "\n",
      method, world, absl::GetFlag(FLAGS_stage), absl::GetFlag(FLAGS_layers),
      absl::GetFlag(FLAGS_dim), Median(adamw.ms), Median(muon.ms),
      Median(extra), Median(products.ms), Median(ratios), *least, *largest,
      Median(cpu_ratios),
      absl::StrJoin(ratios, ", ", [](std::string* out, double ratio) {
        absl::StrAppendFormat(out, "%.3f", ratio);
      }));
}

absl::Status Run(int argc, char** argv) {
  absl::SetProgramUsageMessage("measures a step of Muon; see --helpfull");
  TESSERA_RETURN_IF_ERROR(ReadRankFlags(argc, argv));
  TESSERA_RETURN_IF_ERROR(AtLeast(1, FLAGS_layers, FLAGS_dim, FLAGS_rounds));
  TESSERA_ASSIGN_OR_RETURN(const World* world, Init(&argc, argv));
  at::set_num_threads(1);
  std::vector<Contestant> all;
  TESSERA_ASSIGN_OR_RETURN(Contestant adamw, StepOf("AdamW", ""));
  all.push_back(std::move(adamw));
  const std::vector<std::string> methods = absl::GetFlag(FLAGS_methods);
  for (const std::string& method : methods) {
    TESSERA_ASSIGN_OR_RETURN(Contestant muon, StepOf("Muon", method));
    all.push_back(std::move(muon));
    all.push_back(ProductsOf(method, world->rank() == 0));
  }
  TESSERA_RETURN_IF_ERROR(Measure(world->communicator().get(), &all));
  if (world->rank() != 0) return absl::OkStatus();
  for (size_t i = 0; i < methods.size(); ++i) {
    Print(methods[i], world->world_size(), all[0], all[1 + 2 * i],
          all[2 + 2 * i]);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::RunRank("muon", argc, argv, tessera::Run);
}
