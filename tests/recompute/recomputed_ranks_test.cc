// Recomputed modules where gathers are collectives, and ranks that differ: in
// the sizes of what they compute, in what they keep. All ranks must gather the
// same units in the same order, or say which they met in.
#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sharding/dispatch/operator_watch.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using at::Tensor;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr int64_t kDim = 24;
constexpr int kBlocks = 4;

// What rank 1 does otherwise.
bool is_other = false;
// Makes something else when it runs again.
Tensor Unsteady(const Tensor& x) {
  return is_other && ReplayMark::IsSet() ? x * 2 : x * 1;
}
Tensor Silent(const Tensor& x) { return x * 1; }
TORCH_LIBRARY(recomputed_ranks_test, m) {
  m.def("unsteady(Tensor x) -> Tensor");
  m.def("silent", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(Silent)));
}
TORCH_LIBRARY_IMPL(recomputed_ranks_test, CPU, m) {
  m.impl("unsteady", &Unsteady);
}

Tensor Call(const std::string& name, const Tensor& x) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(("recomputed_ranks_test::" + name).c_str(), "")
      .typed<Tensor(const Tensor&)>()
      .call(x);
}

// Of two units: they are gathered in one order where it is computed again, and
// in the other where it is kept.
struct BlockImpl : nn::Module {
  BlockImpl()
      : up(register_module("up", nn::Linear(kDim, 2 * kDim))),
        down(register_module("down", nn::Linear(2 * kDim, kDim))) {}
  Tensor forward(const Tensor& x) {
    Tensor h = bare ? up(x) : torch::gelu(up(x));
    if (!op.empty()) h = h + Call(op, h.detach());
    return x + down(h.sin());
  }
  nn::Linear up, down;
  std::string op;
  bool bare = false;  // where the operator's result is held, so is all of `up`
};
TORCH_MODULE(Block);

struct NetImpl : nn::Module {
  NetImpl() {
    for (int i = 0; i < kBlocks; ++i) blocks->push_back(Block());
    register_module("blocks", blocks);
    head = register_module("head", nn::Linear(kDim, 3));
  }
  Tensor forward(Tensor x) {
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head(x).square().mean();
  }
  nn::ModuleList blocks;
  nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

// What is run: by its words.
struct Case {
  std::string text;
  bool Has(absl::string_view word) const {
    return absl::StrContains(text, word);
  }
};

absl::StatusOr<std::unique_ptr<Engine>> MakeEngineOf(
    const Case& c, Net net, std::shared_ptr<Communicator> comm) {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  auto* const zero = config.mutable_zero_optimization();
  zero->set_stage(3);
  zero->set_stage3_param_persistence_threshold(0);
  zero->set_stage3_max_reuse_distance(0);
  if (c.Has("unfetched")) zero->set_stage3_prefetch_bucket_size(0);
  config.mutable_sharding()->set_shared_working_copy("off");
  config.mutable_sharding()->set_served_gathers("off");
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_optimizer()->mutable_params()->set_lr(0.01);
  if (!c.Has("plainly")) {
    auto* const recompute = config.mutable_activation_checkpointing();
    recompute->add_units("Block");
    if (c.Has("always")) recompute->set_check("always");
    // One block of 60 rows, three of 20.
    if (c.Has("budget")) recompute->set_budget_bytes(44000);
  }
  EngineOptions options;
  options.communicator = std::move(comm);
  options.is_unit = [](const nn::Module& m, absl::string_view) {
    return dynamic_cast<const nn::LinearImpl*>(&m) != nullptr;
  };
  return Engine::Create(net.ptr(), config, options);
}

// Losses, parameters, and how many modules were given up.
TESSERA_RANK_FUNCTION(TrainUnequally) {
  const Case c{std::string(args)};
  const bool other = world.rank() == 1;
  is_other = other;
  torch::manual_seed(1);
  Net net;
  TESSERA_ASSIGN_OR_RETURN(const auto engine,
                           MakeEngineOf(c, net, world.communicator()));
  std::string text, given_up;
  for (int step = 0; step < 3; ++step) {
    auto* const block = (*net->blocks)[1]->as<Block>();
    if (c.Has("unsteady")) block->op = "unsteady";
    block->bare = c.Has("bare");
    if (other && c.Has("silent")) block->op = "silent";
    if (other && c.Has("later") && step > 0) block->op = "unsteady";
    torch::manual_seed(10 + step + world.rank());
    const int64_t rows = other && c.Has("empty")  ? 0
                         : other && c.Has("rows") ? 20
                                                  : 60;
    const Tensor loss = net->forward(torch::randn({rows, kDim}));
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    absl::StrAppend(&text, PrintOf(loss), "\n");
    absl::StrAppend(&given_up, engine->last_step().recompute.given_up, " ");
  }
  TESSERA_ASSIGN_OR_RETURN(const StateDict state, engine->FullStateDict());
  for (const auto& [name, value] : state) {
    absl::StrAppend(&text, name, " ", PrintOf(value), "\n");
  }
  return absl::StrCat(given_up, "|", text);
}

struct Answers {
  std::vector<std::string> given_up, results;
};
Answers Train(const std::string& text) {
  Answers answers;
  for (const auto& answer : RankPool::Get(2)->Run("TrainUnequally", text)) {
    const std::vector<std::string> parts =
        absl::StrSplit(answer.ok() ? *answer : answer.status().ToString(),
                       absl::MaxSplits('|', 1));
    answers.given_up.push_back(parts[0]);
    answers.results.push_back(parts.back());
  }
  return answers;
}

// Trains so without recomputing, once for all cases that compute the same.
const std::vector<std::string>& ResultsOfPlain(const std::string& text) {
  static auto* const known =
      new std::map<std::string, std::vector<std::string>>;
  const std::string what = absl::StrReplaceAll(
      text, {{" always", ""}, {" budget", ""}, {"budget", "same"}});
  const auto [it, is_new] = known->try_emplace(what);
  if (is_new) {
    const Answers plain = Train(absl::StrCat(what, " plainly"));
    EXPECT_THAT(plain.given_up, Each("0 0 0 "));
    it->second = plain.results;
  }
  return it->second;
}

// Cases that end as without recomputing, and what each rank gives up by step.
TEST(RecomputedRanksTest, GiveUpTheSame) {
  const struct {
    std::string text, given_up;
  } cases[] = {
      {"same", "4 4 4 "},
      {"rows", "4 4 4 "},
      {"rows always", "4 4 4 "},
      {"empty", "4 4 4 "},
      {"empty budget", "3 3 3 "},
      // One rank's block has other bits, of which all keep a part; or an
      // operator that may write.
      {"unsteady", "4 4 4 "},
      {"unsteady always", "4 4 4 "},
      {"unsteady bare", "4 4 4 "},
      {"silent", "3 3 3 "},
      {"budget", "3 3 3 "},
      {"rows budget", "3 3 3 "},
      // Not at first; all ranks compare each time.
      {"later always", "4 3 3 "},
  };
  for (const auto& c : cases) {
    for (const std::string& how : {"", " unfetched"}) {
      if (c.text == "later always" && how.empty()) continue;
      SCOPED_TRACE(c.text + how);
      const Answers got = Train(c.text + how);
      EXPECT_EQ(ResultsOfPlain(c.text), got.results);
      EXPECT_THAT(got.given_up, Each(c.given_up));
    }
  }
}

// A rank that comes to run other operators than the rest: all are told of the
// gathers that they meet in.
TEST(RecomputedRanksTest, ThatRunOtherOperatorsLaterAreTold) {
  const Answers got = Train("later unfetched");
  EXPECT_THAT(got.results,
              Each(AllOf(HasSubstr("the ranks are in different collectives"),
                         HasSubstr("all-gather of unit blocks.1.up"),
                         HasSubstr("all-gather of unit blocks.1.down"))));
}

}  // namespace
}  // namespace tessera
