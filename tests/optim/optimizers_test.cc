// Tests each optimizer with an engine: it has the same bits at every stage,
// over the tiers of offload, and where a run goes on from a checkpoint at
// another stage and number of ranks. Also compares AdamW with libtorch's own.
#include <ATen/Version.h>
#include <torch/torch.h>

#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/optim/optimizer_run.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

// Trains `steps` steps from `first` on; saves at the end, or loads before.
// Returns the parameters at the end.
TESSERA_RANK_FUNCTION(TrainWith) {
  const Words words(args);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel("Mlp", world.rank()), ConfigOf(words),
                               world.communicator()));
  if (!words.Get("load").empty()) {
    TESSERA_RETURN_IF_ERROR(
        t.engine->LoadCheckpoint(words.Get("load")).status());
  }
  const int first = std::stoi(words.Get("first", "0"));
  const int steps = std::stoi(words.Get("steps", "3"));
  const int accumulation = std::stoi(words.Get("accumulation", "1"));
  for (int i = first * accumulation; i < (first + steps) * accumulation; ++i) {
    const int of = words.Get("data") == "same" ? 0 : world.rank();
    TESSERA_RETURN_IF_ERROR(t.engine->Backward(t.model->Loss(of, i)));
    const bool moved = !words.Get("moved").empty() && i == first * accumulation;
    if (moved) {
      OffloadStates states;
      states.device = "nvme";
      states.nvme_path = TrainingSpec::SwapFolder();
      TESSERA_RETURN_IF_ERROR(t.engine->Offload(states));
    }
    TESSERA_RETURN_IF_ERROR(t.engine->Step());
    if (moved) TESSERA_RETURN_IF_ERROR(t.engine->Reload());
  }
  if (!words.Get("save").empty()) {
    SaveOptions options;
    options.async = !words.Get("async").empty();
    TESSERA_RETURN_IF_ERROR(
        t.engine->SaveCheckpoint(words.Get("save"), "", options));
    if (options.async) {
      TESSERA_RETURN_IF_ERROR(t.Backward((first + steps) * accumulation));
      TESSERA_RETURN_IF_ERROR(t.engine->Step());
      TESSERA_RETURN_IF_ERROR(t.engine->WaitForCheckpoint());
    }
  }
  return t.Finish();
}

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

class OptimizersTest : public ::testing::TestWithParam<size_t> {
 protected:
  std::vector<std::string> Train(int world_size, const std::string& words) {
    return RunOnRanks(world_size, "TrainWith",
                      absl::StrCat("optimizer=", GetParam(), " ", words));
  }
};

// Each way with one of the dtypes, and for the next optimizer with the other.
TEST_P(OptimizersTest, HasTheSameBitsHoweverItIsSharded) {
  size_t cell = GetParam();
  for (const char* dtype : {"fp32", "bf16"}) {
    ++cell;
    const std::string words = absl::StrCat(" dtype=", dtype);
    const std::vector<std::string> replicated = Train(2, "stage=0" + words);
    EXPECT_THAT(replicated,
                Each(AllOf(replicated[0], HasSubstr("parameter in.weight"))));
    for (const char* how :
         {"stage=1", "stage=2", "stage=3", "stage=3 offload=nvme"}) {
      if (++cell % 2 == 0) continue;
      EXPECT_EQ(Train(2, how + words), replicated) << how << words;
    }
  }
}

// All ranks have the same gradients, and so does their mean.
TEST_P(OptimizersTest, DoesNotDependOnTheNumberOfRanks) {
  const std::string alone = Train(1, "stage=0 data=same")[0];
  EXPECT_THAT(alone, HasSubstr("parameter in.weight"));
  EXPECT_THAT(Train(2, "stage=3 data=same"), Each(alone));
  EXPECT_THAT(Train(4, "stage=2 data=same"), Each(alone));
}

TEST_P(OptimizersTest, GoesOnFromACheckpoint) {
  const TempFolder folder;
  const std::vector<std::string> whole = Train(2, "stage=1 steps=4");
  const std::string dir = folder.path() + "/checkpoint";
  Train(2, absl::StrCat("stage=3 steps=2 save=", dir));
  for (const char* how : {"stage=2", "stage=3 offload=nvme"}) {
    EXPECT_EQ(Train(2, absl::StrCat(how, " first=2 steps=2 load=", dir)), whole)
        << how;
  }
  // With one rank only the states are compared, by a step that one rank makes
  // from them.
  const std::vector<std::string> alone =
      Train(1, absl::StrCat("stage=0 first=2 steps=1 load=", dir));
  const std::string again = folder.path() + "/again";
  Train(2, absl::StrCat("stage=2 steps=0 load=", dir, " save=", again));
  EXPECT_EQ(Train(1, absl::StrCat("stage=0 first=2 steps=1 load=", again)),
            alone);
}

INSTANTIATE_TEST_SUITE_P(
    , OptimizersTest, ::testing::Range(size_t{0}, std::size(kOptimizerCases)),
    [](const auto& info) { return kOptimizerCases[info.param].name; });

// ---- libtorch's fused AdamW

// Every rest of a kernel's vectors, parts of several threads and ranks.
struct Sizes : torch::nn::Module {
  Sizes() {
    torch::manual_seed(1);
    for (int64_t numel = 1; numel <= 64; ++numel) Add(numel);
    for (const int64_t numel : {65, 100, 1000, 4099, 33'333}) Add(numel);
  }
  void Add(int64_t numel) {
    register_parameter(absl::StrCat("p", numel), torch::randn({numel}));
  }
  // All ranks have the same gradients: sums and means of few bits are exact.
  static at::Tensor Gradient(int64_t numel, int64_t step) {
    return (torch::arange(numel) * 37 + step * 11 + numel)
               .remainder(241)
               .sub(120)
               .to(torch::kFloat) /
           128;
  }
  at::Tensor Loss(int64_t step) {
    at::Tensor loss = torch::zeros({});
    for (const at::Tensor& p : parameters()) {
      loss = loss + (p.to(torch::kFloat) * Gradient(p.numel(), step)).sum();
    }
    return loss;
  }
};

// One parameter as torch.optim.AdamW(fused=True) trains it.
struct Plain {
  explicit Plain(const at::Tensor& from)
      : p(from.detach().clone()),
        m(torch::zeros_like(p)),
        v(torch::zeros_like(p)),
        largest(torch::zeros_like(p)) {}
  void Step(const at::Tensor& gradient, int64_t step, bool amsgrad,
            bool maximize) {
    std::vector<at::Tensor> max;
    if (amsgrad) max.push_back(largest);
    at::_fused_adamw_({p}, {gradient}, {m}, {v}, max,
                      {torch::full({}, static_cast<double>(step))}, 0.01, 0.8,
                      0.9, 0.1, 1e-6, amsgrad, maximize);
  }
  at::Tensor p, m, v, largest;
};

// args: words, of TrainingSpec or "amsgrad", "maximize". The elements of each
// parameter, from its end, that are not plain training's: "p9: 1".
TESSERA_RANK_FUNCTION(OtherThanFused) {
  std::string words(args);
  const bool amsgrad = absl::StrContains(words, "amsgrad");
  const bool maximize = absl::StrContains(words, "maximize");
  for (const char* word : {" amsgrad", " maximize"}) {
    absl::StrReplaceAll({{word, ""}}, &words);
  }
  TrainingSpec spec = TrainingSpec::FromText(words);
  spec.optimizer = absl::StrCat(
      "type:'AdamW',params{lr:0.01,betas:[0.8,0.9],eps:1e-6,weight_decay:0.1,"
      "amsgrad:",
      amsgrad ? "true" : "false", ",maximize:", maximize ? "true" : "false",
      "}");
  at::set_num_threads(3);
  auto model = std::make_shared<Sizes>();
  std::vector<Plain> plain;
  for (const at::Tensor& p : model->parameters()) plain.emplace_back(p);
  EngineOptions options;
  options.communicator = world.communicator();
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           Engine::Create(model, ConfigOf(spec), options));
  for (int64_t step = 1; step <= 3; ++step) {
    TESSERA_RETURN_IF_ERROR(engine->Backward(model->Loss(step)));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    torch::NoGradGuard no_grad;
    for (Plain& one : plain) {
      one.Step(Sizes::Gradient(one.p.numel(), step), step, amsgrad, maximize);
    }
  }
  std::string others;
  for (const Plain& one : plain) {
    const int64_t numel = one.p.numel();
    const std::string name = absl::StrCat("p", numel);
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor trained, engine->Master(name));
    const at::Tensor differ = trained.ne(one.p).nonzero();
    if (differ.numel() == 0) continue;
    absl::StrAppend(&others, name, ": ", numel - differ.min().item<int64_t>(),
                    "\n");
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return others;
}

TEST(LibtorchFusedTest, HasItsBitsInEveryElement) {
  const auto others = [](int world_size, absl::string_view words) {
    return RunOnRanks(world_size, "OtherThanFused",
                      absl::StrCat("libtorch_fused=1 ", words));
  };
  for (int world_size = 1; world_size <= 3; ++world_size) {
    for (const char* stage : {"stage=0", "stage=1", "stage=2", "stage=3"}) {
      EXPECT_THAT(others(world_size, stage), Each("")) << stage;
    }
  }
  for (const char* how : {"stage=1 amsgrad", "stage=2 maximize",
                          "stage=3 amsgrad maximize", "stage=1 dtype=bf16"}) {
    EXPECT_THAT(others(2, how), Each("")) << how;
  }
}

// The default computes what libtorch leaves to its scalar code in the same way
// as all the rest.
TEST(LibtorchFusedTest, TheDefaultDiffersInRestsOfEightAlone) {
  const std::string capability = at::get_cpu_capability();
  if (capability != "AVX2" && capability != "AVX512") {
    GTEST_SKIP() << "libtorch runs without FMA here: " << capability;
  }
  for (const std::string& answer : RunOnRanks(2, "OtherThanFused", "stage=2")) {
    EXPECT_NE(answer, "");
    for (const absl::string_view line :
         absl::StrSplit(answer, '\n', absl::SkipEmpty())) {
      const std::vector<std::string> parts = absl::StrSplit(line, ": ");
      int64_t numel = 0, from_end = 0;
      ASSERT_TRUE(absl::SimpleAtoi(parts[0].substr(1), &numel));
      ASSERT_TRUE(absl::SimpleAtoi(parts[1], &from_end));
      EXPECT_LE(from_end, numel % 8) << line;
    }
  }
}

}  // namespace
}  // namespace tessera
