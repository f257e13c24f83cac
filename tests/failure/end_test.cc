// Does every program come to its end? Two ranks train a model whose backward
// holds another (stage 3, shm), print what came of it, and leave in one of four
// ways; many such programs at a time, so that the processors are fought for.
// One that hangs (has not ended, and not run, for the limit) is a failure, with
// the stacks of all its threads. This program run again with kEndingVariable
// set is a rank.
//
//   end_test [--runs=12] [--at_once=4] [--limit_s=60]
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/env.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/world/world.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "gtest/gtest.h"
#include "tests/failure/end_runs.h"
#include "tests/models/recomputed.h"
#include "tests/support/fork_server.h"
#include "third_party/gtest/run_and_exit.h"
#include "torch/torch.h"

namespace tessera {
namespace {

int g_runs = 12;
int g_at_once = 4;
int g_limit_s = 60;
// Of so many runs one is started as users do, which takes longer.
constexpr int kByLauncherEvery = 50;

// ---- the program of a rank ----

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 3; ++i) {
      layers->push_back(torch::nn::Linear(24, 24));
    }
    register_module("layers", layers);
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < layers->size(); ++i) {
      const RecomputedSegment::Segment segment = [this,
                                                  i](const at::Tensor& h) {
        return torch::tanh(layers->ptr<torch::nn::LinearImpl>(i)->forward(h));
      };
      x = RecomputedSegment::apply(x, segment);
    }
    return x.square().mean();
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Net);

absl::Status Train(int* argc, char** argv, Ending ending) {
  WorldOptions options;
  options.backend = "shm";
  TESSERA_ASSIGN_OR_RETURN(const World* world, Init(argc, argv, options));
  at::manual_seed(0);
  auto net = std::make_shared<NetImpl>();
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(4);
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_zero_optimization()->set_stage(3);
  config.mutable_zero_optimization()->set_stage3_param_persistence_threshold(0);
  TESSERA_ASSIGN_OR_RETURN(auto engine, Engine::Create(net, config));
  double result = 0;
  for (int step = 0; step < 3; ++step) {
    at::manual_seed(10 * step + world->rank());
    // Requires a gradient, so that the whole of a segment is in the graph.
    const at::Tensor x = at::randn({4, 24}).requires_grad_();
    const at::Tensor loss = net->forward(x);
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    result = loss.item<double>();
  }
  if (ending == Ending::kClosed || ending == Ending::kWithoutShutdown) {
    TESSERA_RETURN_IF_ERROR(engine->Close());
  }
  std::fprintf(stderr, "result %a\n", result);
  if (ending == Ending::kByExit) std::exit(0);
  return absl::OkStatus();
}

int RankMain(const std::string& text, int argc, char** argv) {
  const auto ending = static_cast<Ending>(std::atoi(text.c_str()));
  const absl::Status status =
      CatchTorch("rank", [&] { return Train(&argc, argv, ending); });
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  if (ending != Ending::kWithoutShutdown) Shutdown();
  return status.ok() ? 0 : 1;
}

// ---- the test ----

struct Counts {
  int ended = 0;
  int hung = 0;
  int failed = 0;
};

// Looks at the oldest first. True if `run` is over.
bool Judge(EndRun& run, Counts* counts) {
  if (run.HasEnded()) {
    ++counts->ended;
    const std::string fault = run.Fault();
    if (fault.empty()) return true;
    ++counts->failed;
    ADD_FAILURE() << run.ToText() << ":\n" << fault;
    return true;
  }
  if (!run.Hangs(absl::Seconds(g_limit_s))) return false;
  ++counts->hung;
  ADD_FAILURE() << run.ToText() << " has not ended, nor run, for " << g_limit_s
                << " s:\n"
                << run.Stacks();
  return true;
}

TEST(EndTest, EveryProgramEnds) {
  Counts counts;
  std::deque<std::unique_ptr<EndRun>> runs;
  const absl::Time begin = absl::Now();
  int started = 0;
  while (started < g_runs || !runs.empty()) {
    while (started < g_runs && static_cast<int>(runs.size()) < g_at_once) {
      runs.push_back(std::make_unique<EndRun>(
          static_cast<Ending>(started % kEndings),
          /*by_launcher=*/started % kByLauncherEvery == kByLauncherEvery - 1));
      if (++started % 100 == 0) {
        std::printf("%s: %d started, %d ended, %d hung, %d failed, %s\n",
                    absl::FormatTime(absl::Now()).c_str(), started,
                    counts.ended, counts.hung, counts.failed,
                    absl::FormatDuration(absl::Now() - begin).c_str());
        std::fflush(stdout);
      }
    }
    for (auto run = runs.begin(); run != runs.end();) {
      run = Judge(**run, &counts) ? runs.erase(run) : run + 1;
    }
    absl::SleepFor(absl::Milliseconds(3));
  }
  std::printf("%d runs: %d ended, %d hung, %d failed\n", g_runs, counts.ended,
              counts.hung, counts.failed);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;  // NOLINT
  ServeForks(kEndingVariable, &argc, &argv);
  const std::optional<std::string> ending = EnvString(kEndingVariable);
  if (ending.has_value()) return RankMain(*ending, argc, argv);
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    absl::string_view arg = argv[i];
    int* const value = absl::ConsumePrefix(&arg, "--runs=")      ? &g_runs
                       : absl::ConsumePrefix(&arg, "--at_once=") ? &g_at_once
                       : absl::ConsumePrefix(&arg, "--limit_s=") ? &g_limit_s
                                                                 : nullptr;
    if (value == nullptr || !absl::SimpleAtoi(arg, value)) {
      std::fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  RunTestsAndExit();
}
