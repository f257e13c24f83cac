// Measures what a trace costs: steps with a recording and without, in turns, in
// one run:
//
//   bazel-bin/benchmarks/trace_cost --world=2 --rounds 41 --layers 6 --dim 256
//
// Every round makes a step without a recording and one with it, in an order
// that changes from round to round; ranks begin each together. Rank 0 prints
// one line of JSON: medians of both in ms, the median of the rounds' ratios
// with its quartiles, the spans of a step, and what a scope costs while nothing
// is recorded, in ns.
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "base/status.h"
#include "base/trace/trace.h"
#include "benchmarks/gpt/peer_gpt.h"
#include "benchmarks/rank_program.h"
#include "comm/world/world.h"
#include "config/config.pb.h"
#include "engine/engine.h"

ABSL_FLAG(int, rounds, 41, "Rounds that are measured, of two steps each.");
ABSL_FLAG(int64_t, layers, 6, "Blocks of the model, a unit each.");
ABSL_FLAG(int64_t, dim, 256, "Their width.");
ABSL_FLAG(int64_t, batch, 4, "Sequences of a rank's step.");
ABSL_FLAG(int64_t, seq, 128, "Their length.");
ABSL_FLAG(int, stage, 3, "0 to 3.");

namespace tessera {
namespace {

constexpr int kWarmUp = 4;

absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(
    const std::shared_ptr<PeerGpt>& model, const World& world) {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(absl::GetFlag(FLAGS_batch));
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_optimizer()->mutable_params()->set_lr(1e-4);
  config.mutable_zero_optimization()->set_stage(absl::GetFlag(FLAGS_stage));
  EngineOptions options;
  options.communicator = world.communicator();
  return Engine::Create(model, config, options);
}

struct Cost {
  std::vector<double> plain_ms, traced_ms, ratios;
  size_t spans = 0;  // of the last traced step
};

class Measuring {
 public:
  Measuring(const World& world, std::shared_ptr<PeerGpt> model, Engine* engine)
      : world_(world), model_(std::move(model)), engine_(engine) {}

  absl::StatusOr<Cost> Run() {
    for (int i = 0; i < kWarmUp; ++i) {
      TESSERA_RETURN_IF_ERROR(Step(false).status());
    }
    for (int i = 0; i < absl::GetFlag(FLAGS_rounds); ++i) {
      double plain = 0, traced = 0;
      for (const bool second : {false, true}) {
        const bool traces = second != (i % 2 == 0);
        double& milliseconds = traces ? traced : plain;
        TESSERA_ASSIGN_OR_RETURN(milliseconds, Step(traces));
      }
      cost_.plain_ms.push_back(plain);
      cost_.traced_ms.push_back(traced);
      cost_.ratios.push_back(traced / plain);
    }
    return std::move(cost_);
  }

 private:
  absl::StatusOr<double> Step(bool traces) {
    const at::Tensor tokens = torch::randint(
        PeerGptOptions::kVocabulary,
        {absl::GetFlag(FLAGS_batch), absl::GetFlag(FLAGS_seq)}, at::kLong);
    TESSERA_RETURN_IF_ERROR(world_.communicator()->Barrier("round"));
    if (traces) StartTrace();
    const int64_t begin = TraceNow();
    TESSERA_RETURN_IF_ERROR(engine_->Backward(model_->Loss(tokens, tokens)));
    TESSERA_RETURN_IF_ERROR(engine_->Step());
    const int64_t end = TraceNow();
    if (traces) cost_.spans = StopTrace().spans.size();
    return static_cast<double>(end - begin) / 1e6;
  }

  const World& world_;
  const std::shared_ptr<PeerGpt> model_;
  Engine* const engine_;
  Cost cost_;
};

double Quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q *
                                    static_cast<double>(values.size() - 1))];
}

double ScopeNanos() {
  constexpr int kCalls = 10000000;
  const int64_t begin = TraceNow();
  for (int i = 0; i < kCalls; ++i) {
    const TraceScope scope(TraceTrack::kMain, "nothing");
    asm volatile("" ::: "memory");
  }
  return static_cast<double>(TraceNow() - begin) / kCalls;
}

absl::Status Run(int argc, char** argv) {
  absl::SetProgramUsageMessage("What a trace costs a step.");
  TESSERA_RETURN_IF_ERROR(ReadRankFlags(argc, argv));
  TESSERA_RETURN_IF_ERROR(AtLeast(1, FLAGS_rounds));
  TESSERA_ASSIGN_OR_RETURN(const World* world, Init(&argc, argv));
  torch::manual_seed(1);
  const auto model = std::make_shared<PeerGpt>(
      PeerGptOptions{absl::GetFlag(FLAGS_dim), absl::GetFlag(FLAGS_layers), 4,
                     absl::GetFlag(FLAGS_seq)});
  TESSERA_ASSIGN_OR_RETURN(const auto engine, MakeEngine(model, *world));
  TESSERA_ASSIGN_OR_RETURN(const Cost cost,
                           Measuring(*world, model, engine.get()).Run());
  if (world->rank() == 0) {
    std::printf(
        "{\"ranks\": %d, \"plain_ms\": %.3f, \"traced_ms\": %.3f, \"ratio\": "
        "%.4f, \"ratio_quartiles\": [%.4f, %.4f], \"spans\": %zu, "
        "\"scope_off_ns\": %.2f}\n",
        world->world_size(), Quantile(cost.plain_ms, 0.5),
        Quantile(cost.traced_ms, 0.5), Quantile(cost.ratios, 0.5),
        Quantile(cost.ratios, 0.25), Quantile(cost.ratios, 0.75), cost.spans,
        ScopeNanos());
  }
  return engine->Close();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::RunRank("trace_cost", argc, argv, tessera::Run);
}
