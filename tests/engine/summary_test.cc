// The table of a module: plain, and of one that an engine trains in shards.
#include "engine/summary.h"

#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

struct BlockImpl : nn::Module {
  BlockImpl() {
    up = register_module("up", nn::Linear(40, 30));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({30})));
    for (auto& p : norm->parameters()) p.set_requires_grad(false);
  }
  nn::Linear up{nullptr};
  nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Block);

// Its weight is another module's.
struct HeadImpl : nn::Module {
  explicit HeadImpl(const at::Tensor& tied) {
    register_parameter("weight", tied);
    register_module("drop", nn::Dropout());
  }
};
TORCH_MODULE(Head);

struct NetImpl : nn::Module {
  NetImpl() {
    token = register_module("token", nn::Embedding(50, 40));
    one = register_module("one", Block());
    two = register_module("two", Block());
    batch = register_module("batch", nn::BatchNorm1d(3));
    batch->to(torch::kBFloat16);
    head = register_module("head", Head(token->weight));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const at::Tensor x = token(tokens);
    return one->norm(one->up(x)).sum() + two->norm(two->up(x)).sum();
  }
  nn::Embedding token{nullptr};
  Block one{nullptr}, two{nullptr};
  nn::BatchNorm1d batch{nullptr};
  Head head{nullptr};
};
TORCH_MODULE(Net);

constexpr char kTable[] =
    R"(module    class        parameters  dtype              frozen
(model)   Net               4,586  bfloat16, float32  part
  token   Embedding         2,000  float32
  one     Block             1,290  float32            part
    up    Linear            1,230  float32
    norm  LayerNorm            60  float32            yes
  two     Block             1,290  float32            part
    up    Linear            1,230  float32
    norm  LayerNorm            60  float32            yes
  batch   BatchNorm1d           6  bfloat16
  head    Head              2,000  float32
    drop  Dropout
4,586 parameters (17.9 KiB): 4,466 trainable, 120 frozen; 7 numbers in buffers
)";

TEST(SummaryTest, ATableOfAllModules) {
  Net net;
  EXPECT_EQ(Summary(*net), kTable);
}

TEST(SummaryTest, DeeperModulesCountWhereTheyAre) {
  Net net;
  SummaryOptions options;
  options.depth = 0;
  const std::string text = Summary(*net, options);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3) << text;
  EXPECT_THAT(text, HasSubstr("(model)  Net         4,586  "));
  options.depth = 1;
  EXPECT_THAT(Summary(*net, options),
              AllOf(HasSubstr("  one    Block "), Not(HasSubstr("LayerNorm"))));
}

TEST(SummaryTest, NumbersAreGrouped) {
  EXPECT_THAT(Summary(*nn::Linear(nn::LinearOptions(1000, 999).bias(false))),
              HasSubstr("  999,000  "));
  EXPECT_THAT(Summary(*nn::Linear(nn::LinearOptions(1000, 1000).bias(false))),
              AllOf(HasSubstr("  1,000,000  "), HasSubstr("(3.8 MiB)")));
  EXPECT_THAT(Summary(*nn::Dropout()), HasSubstr("\n0 parameters (0 bytes)"));
}

TESSERA_RANK_FUNCTION(SummaryInShards) {
  at::manual_seed(1);
  Net net;
  TrainingSpec spec;
  spec.stage = 3;
  spec.param_persistence_threshold = 0;
  EngineOptions options;
  options.communicator = world.communicator();
  options.is_unit = [](const nn::Module& module, absl::string_view) {
    return dynamic_cast<const BlockImpl*>(&module) != nullptr;
  };
  TESSERA_ASSIGN_OR_RETURN(const auto engine,
                           Engine::Create(net, ConfigOf(spec), options));
  SummaryOptions summary;
  summary.engine = engine.get();
  const std::string text = Summary(*net, summary);
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return text;
}

// The numbers are those of whole parameters.
TEST(SummaryTest, WithAnEngineItTellsUnits) {
  const std::vector<std::string> texts = RunOnRanks(2, "SummaryInShards", "");
  const std::vector<std::string> lines = absl::StrSplit(texts[0], '\n');
  ASSERT_EQ(lines.size(), 15u) << texts[0];
  const std::vector<std::string> plain = absl::StrSplit(kTable, '\n');
  for (size_t i = 1; i < plain.size() - 2; ++i) {
    EXPECT_TRUE(absl::StartsWith(lines[i], plain[i])) << lines[i];
  }
  EXPECT_THAT(lines[1], EndsWith(" units"));
  EXPECT_THAT(lines[3],
              AllOf(HasSubstr("Block"), EndsWith("  one, one (frozen)")));
  EXPECT_THAT(lines[7], AllOf(HasSubstr("Linear"), EndsWith(" two")));
  EXPECT_THAT(lines[13], AllOf(StartsWith("stage 3: this rank holds "),
                               HasSubstr(" without sharding it would hold ")));
}

}  // namespace
}  // namespace tessera
