// Constructs modules that are larger than a rank's budget: values, buffers and
// the generator are as after plain construction.
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/torch_guard.h"
#include "comm/world/world.h"
#include "engine/construct_sharded.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sharding/construct/construction.h"
#include "sharding/flat/use.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using at::Tensor;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr int64_t kBudget = 32 << 10;

// Odd does what constructors do.
struct Odd : nn::Module {
  explicit Odd(int depth = 6) {
    embedding = register_module(
        "embedding",
        nn::Embedding(nn::EmbeddingOptions(97, 32).padding_idx(0)));
    for (int i = 0; i < depth; ++i) {
      layers.push_back(
          register_module(absl::StrCat("layer", i), nn::Linear(32, 32)));
    }
    lstm = register_module("lstm", nn::LSTM(32, 24));
    norm = register_module("norm", nn::BatchNorm1d(200));
    // Tables made by hand.
    positions = register_buffer("positions", torch::zeros({40, 32}));
    auto rows = positions.accessor<float, 2>();
    for (int i = 0; i < 40; ++i) {
      for (int j = 0; j < 32; ++j) rows[i][j] = static_cast<float>(i * j);
    }
    const std::vector<float> weights(300, 2.5f);
    classes = register_parameter("classes", torch::tensor(weights));
    frequencies = torch::rand({16, 16});  // nobody's
    halves = classes.detach().view({2, 150});
    // A second pass, which reads what the first one made.
    for (auto& layer : layers) {
      nn::init::normal_(layer->weight, 0, 0.02);
      nn::init::zeros_(layer->bias);
    }
    torch::NoGradGuard no_grad;
    for (const Tensor& p : parameters()) {
      if (p.sum().item<float>() > 1) p.div_(p.norm());
    }
    nn::init::orthogonal_(layers[1]->weight);
    layers[2]->weight.copy_(layers[3]->weight.t());
    layers[4]->weight.set_data(torch::rand({32, 32}));
    embedding->weight.select(0, 1).fill_(3);  // a part of one of long ago
    layers[5]->weight.normal_().mul_(frequencies.mean());
    drawn = register_buffer("drawn", torch::rand({3}));
  }
  nn::Embedding embedding{nullptr};
  std::vector<nn::Linear> layers;
  nn::LSTM lstm{nullptr};
  nn::BatchNorm1d norm{nullptr};
  Tensor positions, classes, frequencies, halves, drawn;
};

Record StateOf(Odd& odd) {
  Record record;
  AddState(odd, at::detail::getDefaultCPUGenerator().get_state(), &record);
  record.push_back(absl::StrCat("frequencies ", PrintOf(odd.frequencies)));
  return record;
}

absl::StatusOr<std::shared_ptr<Odd>> Construct(int64_t budget = kBudget) {
  torch::manual_seed(5);
  return ConstructSharded(budget, [] { return std::make_shared<Odd>(); });
}

// ---- values

TESSERA_RANK_FUNCTION(ConstructAndTakeOver) {
  torch::manual_seed(5);
  Odd plain;
  const Record expected = StateOf(plain);
  TESSERA_ASSIGN_OR_RETURN(const auto odd, Construct());
  // StateOf has buffers, the generator, and a plain member.
  Record got = StateOf(*odd);
  TESSERA_ASSIGN_OR_RETURN(
      auto engine, Engine::Create(odd, ConfigOf(TrainingSpec::FromText(args))));
  for (const auto& p : plain.named_parameters()) {
    TESSERA_ASSIGN_OR_RETURN(const Tensor whole, engine->Parameter(p.key()));
    got.push_back(ParameterLine(p.key(), whole));
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  Record all = expected;
  for (int i = 0; i < 2; ++i) {
    for (const auto& p : plain.named_parameters()) {
      all.push_back(ParameterLine(p.key(), p.value()));
    }
  }
  for (const auto& p : odd->named_parameters()) {
    got.push_back(ParameterLine(p.key(), p.value()));
  }
  if (!torch::equal(odd->halves, plain.halves)) got.push_back("halves");
  return FirstDifference(all, got);
}

TEST(ConstructTest, GivesWhatPlainConstructionGives) {
  for (const int world_size : {1, 2, 3}) {
    for (const int stage : {0, 2, 3}) {
      TrainingSpec spec;
      spec.stage = stage;
      EXPECT_THAT(RunOnRanks(world_size, "ConstructAndTakeOver", spec.ToText()),
                  Each(""))
          << "W " << world_size << ", stage " << stage;
    }
  }
}

TESSERA_RANK_FUNCTION(UseBeforeTheEngine) {
  torch::manual_seed(5);
  Odd plain;
  TESSERA_ASSIGN_OR_RETURN(const auto odd, Construct());
  {
    torch::NoGradGuard no_grad;
    for (Odd* each : {&plain, odd.get()}) {
      for (Tensor& p : each->parameters()) p.mul_(2).add_(p.mean());
    }
  }
  std::string different;
  const auto expected = plain.named_parameters();
  for (const auto& p : odd->named_parameters()) {
    if (!torch::equal(p.value(), expected[p.key()])) different += p.key() + " ";
  }
  return different;
}

TEST(ConstructTest, OperatorsMayUseParametersBeforeTheEngine) {
  EXPECT_THAT(RunOnRanks(2, "UseBeforeTheEngine", ""), Each(""));
}

// ---- what constructors do now and then

// This constructor finds sizes by a trial, catches an error, and registers a
// buffer that is a view.
struct Careful : nn::Module {
  Careful() {
    auto conv = register_module("conv", nn::Conv2d(3, 8, 3));
    const auto flat = conv->forward(torch::rand({2, 3, 16, 16})).flatten(1);
    head = register_module("head", nn::Linear(flat.size(1), 10));
    alias = register_buffer("alias", head->weight.detach().view({-1}));
    trial = register_buffer("trial", flat.detach());
    for (int i = 0; i < 20; ++i) (void)torch::rand({40, 40});
    torch::NoGradGuard no_grad;
    EXPECT_THROW(head->weight.copy_(torch::rand({7, 9})), std::exception);
  }
  nn::Linear head{nullptr};
  Tensor alias, trial;
};

TESSERA_RANK_FUNCTION(ConstructCarefully) {
  torch::manual_seed(5);
  Careful plain;
  torch::manual_seed(5);
  auto made =
      ConstructSharded(kBudget, [] { return std::make_shared<Careful>(); });
  TESSERA_RETURN_IF_ERROR(made.status());
  const auto same = [](const Tensor& a, const Tensor& b) {
    return torch::equal(a, b) ? "" : "differs; ";
  };
  return absl::StrCat(same(plain.head->weight, (*made)->head->weight),
                      same(plain.alias, (*made)->alias),
                      same(plain.trial, (*made)->trial));
}

TEST(ConstructTest, TrialsCaughtErrorsAndViewsAsBuffers) {
  EXPECT_THAT(RunOnRanks(2, "ConstructCarefully", ""), Each(""));
}

// args: "made", "written".
TESSERA_RANK_FUNCTION(ConstructUnlike) {
  const auto seed = [&](bool other) {
    torch::manual_seed(other ? 5 + world.rank() : 5);
  };
  seed(args == "made");
  // "made": nothing is evicted before the end.
  auto made = ConstructSharded(args == "made" ? 1 << 30 : kBudget,
                               [] { return std::make_shared<Odd>(); });
  TESSERA_RETURN_IF_ERROR(made.status());
  seed(true);
  for (auto& layer : (*made)->layers) nn::init::normal_(layer->weight);
  for (auto& layer : (*made)->layers) (void)layer->weight.sum();
  return "no error";
}

TEST(ConstructTest, ValuesThatDifferAreNeverMixed) {
  EXPECT_THAT(RunOnRanks(3, "ConstructUnlike", "made"),
              Each(HasSubstr("construct different values, first in ")));
  EXPECT_THAT(RunOnRanks(2, "ConstructUnlike", "written"),
              Each(HasSubstr("construct different values, first seen in "
                             "layer")));
}

// ---- memory

// Bytes held at most beyond the shard, evictions, gathers, overwrites.
TESSERA_RANK_FUNCTION(CountEvictions) {
  MemoryLedger& ledger = MemoryLedger::Host();
  ledger.ResetPeak();
  const int64_t before = ledger.total().current_bytes;
  torch::manual_seed(5);
  auto construction =
      std::make_shared<Construction>(world.communicator(), kBudget);
  std::shared_ptr<Odd> odd;
  {
    const Construction::Scope scope(construction.get());
    odd = std::make_shared<Odd>();
  }
  TESSERA_RETURN_IF_ERROR(construction->Finish(*odd));
  const Construction::Counts counts = construction->counts();
  int64_t shard = 0;
  for (const Tensor& p : odd->parameters()) {
    if (IsEvictable(p)) shard += static_cast<int64_t>(p.nbytes());
  }
  shard /= world.world_size();
  const int64_t held = ledger.total().current_bytes - before;
  const int64_t peak = ledger.total().peak_bytes - before;
  odd = nullptr;
  construction = nullptr;
  return absl::StrCat(
      counts.evictions > 10 ? "" : "few evictions; ",
      counts.gathers > 5 ? "" : "few gathers; ",
      counts.overwrites >= 5 ? "" : "few overwrites; ",
      // Pieces are rounded up to 64 bytes.
      held >= shard && held < shard + 64 * 30
          ? ""
          : absl::StrCat("held ", held, " of a shard of ", shard, "; "),
      peak <= held + kBudget
          ? ""
          : absl::StrCat("peak ", peak, " with a shard of ", shard, "; "),
      ledger.total().current_bytes == before ? "" : "something is still held");
}

TEST(ConstructTest, HoldsTheShardAndTheBudget) {
  EXPECT_THAT(RunOnRanks(2, "CountEvictions", ""), Each(""));
  EXPECT_THAT(RunOnRanks(3, "CountEvictions", ""), Each(""));
}

// ---- raw pointers

struct Pointers : nn::Module {
  // `mode` says what is done with a tensor that has been evicted.
  explicit Pointers(const std::string& mode) {
    auto table = register_parameter("table", torch::zeros({32, 32}));
    std::unique_ptr<Use> use;
    if (mode == "used") use = std::make_unique<Use>(table);
    float* const data = table.data_ptr<float>();
    for (int i = 0; i < 20; ++i) {
      register_parameter(absl::StrCat("p", i), torch::rand({32, 32}));
    }
    if (mode == "accessor") table.accessor<float, 2>()[3][4] = 7;
    if (mode != "accessor") data[3] = 7;  // "stale": faults
  }
};

TESSERA_RANK_FUNCTION(ConstructPointers) {
  torch::manual_seed(5);
  auto made = ConstructSharded(16 << 10, [mode = std::string(args)] {
    return std::make_shared<Pointers>(mode);
  });
  TESSERA_RETURN_IF_ERROR(made.status());
  return absl::StrCat(
      (*made)->named_parameters()["table"].flatten()[3].item<float>());
}

TEST(ConstructTest, AccessorsOfEvictedTensorsThrowAndSayWhatToDo) {
  EXPECT_THAT(RunOnRanks(2, "ConstructPointers", "accessor"),
              Each(AllOf(HasSubstr("a tensor (Float [32, 32]) is sharded"),
                         HasSubstr("tessera::Use(t)"))));
}

TEST(ConstructTest, UseKeepsATensorWhole) {
  EXPECT_THAT(RunOnRanks(2, "ConstructPointers", "used"), Each("7"));
}

// Ignored parameters are the module's own, whole, and operators use them on any
// rank alone.
TESSERA_RANK_FUNCTION(ConstructIgnored) {
  torch::manual_seed(5);
  Odd plain;
  TESSERA_ASSIGN_OR_RETURN(const auto odd, Construct());
  proto::Config config = ConfigOf(TrainingSpec::FromText("stage=3"));
  config.mutable_sharding()->add_ignored_parameters("layer*.weight");
  TESSERA_ASSIGN_OR_RETURN(auto engine, Engine::Create(odd, config));
  std::string different;
  for (int i = 0; i < 6 && world.rank() == 1; ++i) {
    const Tensor& weight = odd->layers[i]->weight;
    const float* const data = weight.data_ptr<float>();
    if (!torch::equal(weight, plain.layers[i]->weight) || data == nullptr) {
      absl::StrAppend(&different, i, " ");
    }
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return different;
}

TEST(ConstructTest, IgnoredParametersBecomePlain) {
  EXPECT_THAT(RunOnRanks(2, "ConstructIgnored", ""), Each(""));
}

// ---- errors

TESSERA_RANK_FUNCTION(CreateOverAnotherGroup) {
  TESSERA_ASSIGN_OR_RETURN(const auto odd, Construct());
  EngineOptions options;
  TESSERA_ASSIGN_OR_RETURN(
      options.communicator,
      world.communicator()->Split(world.rank() / 2, CommTag{"halves"}));
  return Engine::Create(odd, ConfigOf(TrainingSpec()), options)
      .status()
      .ToString();
}

TESSERA_RANK_FUNCTION(MoveConstructed) {
  TESSERA_ASSIGN_OR_RETURN(const auto odd, Construct());
  EngineOptions options;
  options.device = at::Device(std::string(args));
  return Engine::Create(odd, ConfigOf(TrainingSpec()), options)
      .status()
      .ToString();
}

TEST(ConstructTest, TheModuleStaysOnTheCpu) {
  EXPECT_THAT(RunOnRanks(2, "MoveConstructed", "cuda:0"),
              Each(AllOf(HasSubstr("UNIMPLEMENTED"),
                         HasSubstr("EngineOptions::device is cuda:0"))));
  EXPECT_THAT(RunOnRanks(2, "MoveConstructed", "cpu"), Each("OK"));
}

TEST(ConstructTest, TheEngineHasTheSameGroup) {
  EXPECT_THAT(RunOnRanks(4, "CreateOverAnotherGroup", ""),
              Each(HasSubstr("over 4 ranks")));
}

TESSERA_RANK_FUNCTION(ConstructFails) {
  const bool last = world.rank() == world.world_size() - 1;
  const bool all_fits = args == "seed, and all fits";
  torch::manual_seed((args == "seed" || all_fits) && last ? 6 : 5);
  const int64_t budget = args == "budget" ? 0 : all_fits ? 1 << 30 : kBudget;
  const auto made = ConstructSharded(budget, [&]() -> std::shared_ptr<Odd> {
    auto odd = std::make_shared<Odd>();
    if (args == "throws" && last) throw std::runtime_error("no such file");
    if (args == "null") return nullptr;
    if (args == "nested") {
      const auto inner = Construct();
      if (!inner.ok()) ThrowIfError(inner.status());
    }
    return odd;
  });
  return made.status().ToString();
}

TEST(ConstructTest, ErrorsAreThoseOfAllRanks) {
  EXPECT_THAT(RunOnRanks(3, "ConstructFails", "seed, and all fits"),
              Each(AllOf(HasSubstr("ranks 0 and 2 construct different values"),
                         HasSubstr("give all ranks the same seed"))));
  EXPECT_THAT(RunOnRanks(2, "ConstructFails", "budget"),
              Each(HasSubstr("rank 0: ConstructSharded: the "
                             "budget is 0 bytes")));
  EXPECT_THAT(RunOnRanks(2, "ConstructFails", "null"),
              Each(HasSubstr("returned no module")));
  EXPECT_THAT(RunOnRanks(2, "ConstructFails", "nested"),
              Each(HasSubstr("ConstructSharded within another")));
  EXPECT_THAT(RunOnRanks(3, "ConstructFails", "throws"),
              Each(AllOf(HasSubstr("rank 2"), HasSubstr("no such file"))));
  EXPECT_THAT(RunOnRanks(3, "ConstructFails", "seed"),
              Each(AllOf(HasSubstr("ranks construct different values"),
                         HasSubstr("give all ranks the same seed"))));
  // What a rank announced may reach the others after their answers.
  RankPool::EndAll();
}

}  // namespace
}  // namespace tessera
