// Ordinary modules whose parameters are divided among ranks: loss and gradients
// are those of the whole module, in float64, where sums in another order differ
// by some 1e-16 of the addends.

#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/torch_guard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "parallel/tensor/placed.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using at::Tensor;
using ::testing::HasSubstr;

constexpr int64_t kDim = 12, kHeads = 6, kWords = 18, kBatch = 2, kLength = 5;

// A block of a transformer, as C++ writes it.
struct BlockImpl : nn::Module {
  BlockImpl() {
    for (auto* each : {&q, &k, &v, &o}) *each = nn::Linear(kDim, kDim);
    up = nn::Linear(kDim, 4 * kDim);
    down = nn::Linear(4 * kDim, kDim);
    register_module("n1", n1);
    register_module("n2", n2);
    register_module("q", q);
    register_module("k", k);
    register_module("v", v);
    register_module("o", o);
    register_module("up", up);
    register_module("down", down);
  }
  Tensor Heads(const Tensor& x) {
    return x.view({x.size(0), x.size(1), kHeads, x.size(2) / kHeads})
        .transpose(1, 2);
  }
  Tensor forward(Tensor x) {
    const Tensor y = n1(x);
    const Tensor a = at::scaled_dot_product_attention(
        Heads(q(y)), Heads(k(y)), Heads(v(y)), {}, 0., true);
    x = x + o(a.transpose(1, 2).reshape(x.sizes()));
    return x + down(F::gelu(up(n2(x))));
  }
  nn::LayerNorm n1{nn::LayerNormOptions({kDim})},
      n2{nn::LayerNormOptions({kDim})};
  nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr}, up{nullptr},
      down{nullptr};
};
TORCH_MODULE(Block);

struct NetImpl : nn::Module {
  NetImpl() {
    register_module("words", words);
    register_module("a", a);
    register_module("b", b);
    register_module("head", head);
    to(at::kDouble);
  }
  Tensor Hidden(const Tensor& t) { return b(a(words(t))); }
  nn::Embedding words{kWords, kDim};
  Block a, b;
  nn::Linear head{nn::LinearOptions(kDim, kWords).bias(false)};
};
TORCH_MODULE(Net);

// Computes a loss with the module.
using Program = std::function<Tensor(Net& net, const Tensor& tokens)>;

Tensor NextOf(const Tensor& tokens) {
  return (tokens * 7 + 3).remainder(kWords);
}

Tensor LossOf(Net& net, const Tensor& x, const Tensor& tokens) {
  return F::cross_entropy(net->head(x).flatten(0, 1), NextOf(tokens).flatten());
}

// Doubles, with a backward of its own.
struct Doubled : torch::autograd::Function<Doubled> {
  static Tensor forward(torch::autograd::AutogradContext* /*context*/,
                        const Tensor& x) {
    return x * 2;
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* /*context*/,
      torch::autograd::variable_list gradients) {
    return {gradients[0] * 2};
  }
};

// x @ w^T, with a backward of its own.
struct Product : torch::autograd::Function<Product> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const Tensor& x, const Tensor& w) {
    context->save_for_backward({x, w});
    return at::matmul(x, w.t());
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor& g = gradients[0];
    return {at::matmul(g, saved[1]), at::matmul(g.t(), saved[0])};
  }
};

const std::map<std::string, Program>& Programs() {
  static const auto* const all = new std::map<std::string, Program>{
      {"transformer",
       [](Net& net, const Tensor& t) {
         return LossOf(net, net->Hidden(t), t);
       }},
      {"ignored targets",
       [](Net& net, const Tensor& t) {
         Tensor next = NextOf(t).flatten();
         next = next.masked_fill(next.lt(9), -100);
         return F::cross_entropy(
             net->head(net->Hidden(t)).flatten(0, 1), next,
             F::CrossEntropyFuncOptions().reduction(torch::kSum));
       }},
      {"smoothed targets",
       [](Net& net, const Tensor& t) {
         return F::cross_entropy(
             net->head(net->Hidden(t)).flatten(0, 1), NextOf(t).flatten(),
             F::CrossEntropyFuncOptions().label_smoothing(0.1));
       }},
      {"attention by hand",
       [](Net& net, const Tensor& t) {
         const Tensor x = net->words(t);
         const Tensor q = net->a->Heads(net->a->q(x)),
                      k = net->a->Heads(net->a->k(x)),
                      v = net->a->Heads(net->a->v(x));
         Tensor scores = q.matmul(k.transpose(-2, -1)) / std::sqrt(2.0);
         const Tensor later = at::ones({kLength, kLength}, at::kBool).triu(1);
         scores.masked_fill_(later, -1e9);
         const Tensor mixed = at::softmax(scores, -1).matmul(v);
         return LossOf(net, net->a->o(mixed.permute({0, 2, 1, 3}).flatten(2)),
                       t);
       }},
      {"writes in place",
       [](Net& net, const Tensor& t) {
         Tensor y = net->a->up(net->words(t));
         y.mul_(0.5).add_(1).cumsum_(2);  // without a rule
         y.select(0, 1).mul_(3);
         y.relu_();
         return LossOf(net, net->a->down(y), t);
       }},
      {"operators without a rule",
       [](Net& net, const Tensor& t) {
         const Tensor y = net->a->up(net->words(t));
         const Tensor flipped = y.flip({2}).cumsum(2) * 0.01;
         const Tensor parts = at::cat(at::chunk(y, 4, 2), 0);
         return LossOf(net, net->a->down(y + flipped), t) +
                parts.square().mean();
       }},
      {"lists of parts",
       [](Net& net, const Tensor& t) {
         const Tensor y = net->a->up(net->words(t));
         const std::vector<Tensor> rows = y.split(2, 1);
         const Tensor both =
             at::stack({at::cat(rows, 1), y.unsqueeze(0).squeeze(0)}, 0);
         return LossOf(net, net->a->down(both.mean({0}) + both.sum({0}) * 0.1),
                       t);
       }},
      {"a function of the user's",
       [](Net& net, const Tensor& t) {
         const Tensor y = Doubled::apply(net->a->up(net->words(t)));
         return LossOf(net, net->a->down(y.relu()), t);
       }},
      {"sums over what is divided",
       [](Net& net, const Tensor& t) {
         const Tensor y = net->a->up(net->words(t));
         const Tensor scale = y.sum({-1}, true) * 0.01;
         return LossOf(net, net->a->down(y * scale), t) + y.mean();
       }},
      {"a function of what was written through a view",
       [](Net& net, const Tensor& t) {
         const Tensor y = net->a->up(net->words(t));
         y.select(0, 1).mul_(3);
         return Doubled::apply(y).square().mean() +
                LossOf(net, net->words(t), t);
       }},
      {"a function of a parameter",
       [](Net& net, const Tensor& t) {
         const Tensor x = net->words(t).flatten(0, 1);
         const Tensor y = Product::apply(x, net->a->up->weight);
         return LossOf(net, net->a->down(y.relu()).unsqueeze(0), t);
       }},
      {"two steps",
       [](Net& net, const Tensor& t) {
         LossOf(net, net->Hidden(t), t).backward();
         {
           torch::NoGradGuard no_grad;
           for (Tensor& p : net->parameters()) p.mul_(0.9);
         }
         return LossOf(net, net->Hidden(t), t);
       }},
      {"a function's result, written",
       [](Net& net, const Tensor& t) {
         Tensor y = Doubled::apply(net->a->up(net->words(t)));
         y.relu_();
         return LossOf(net, net->a->down(y), t);
       }},
      {"means and types",
       [](Net& net, const Tensor& t) {
         const Tensor y = net->a->up(net->words(t));
         const Tensor all = y.mean(at::IntArrayRef{});
         const Tensor one = at::full({1}, 2.0, at::kFloat).type_as(y).sum();
         const Tensor none = at::dropout(y, 1.0, true);
         Tensor out = at::zeros({0}, at::kDouble);
         {
           torch::NoGradGuard no_grad;
           at::mul_out(out, y, y);
         }
         return LossOf(net, net->a->down(y + none), t) + all * one + out.sum();
       }},
      {"a penalty of gradients",
       [](Net& net, const Tensor& t) {
         const Tensor x = net->words(t).detach().requires_grad_();
         const Tensor loss = LossOf(net, net->a->down(net->a->up(x).tanh()), t);
         const Tensor gradient =
             torch::autograd::grad({loss}, {x}, {}, true, true)[0];
         return loss + gradient.square().sum();
       }},
      {"parameters by themselves",
       [](Net& net, const Tensor& t) {
         Tensor penalty = at::zeros({}, at::kDouble);
         for (const Tensor& p : net->parameters())
           penalty = penalty + p.pow(2).sum();
         return LossOf(net, net->Hidden(t), t) + penalty * 0.01;
       }},
  };
  return *all;
}

// Along which dimension a parameter is divided; -1: it is whole.
int64_t DividedAlong(const std::string& name) {
  for (const char* const column : {".q.", ".k.", ".v.", ".up."}) {
    if (absl::StrContains(name, column)) return 0;
  }
  if (name == "words.weight" || name == "head.weight") return 0;
  const bool row = absl::StrContains(name, ".o.weight") ||
                   absl::StrContains(name, ".down.weight");
  return row ? 1 : -1;
}

// What a rank has of each parameter: itself, or its part.
std::map<std::string, Tensor> Divide(Net& net,
                                     const std::shared_ptr<PartGroup>& group) {
  std::map<std::string, Tensor> parts;
  for (const auto& each : net->named_parameters()) {
    const int64_t dim = DividedAlong(each.key());
    if (dim < 0) {
      parts[each.key()] = each.value();
      continue;
    }
    Tensor part;
    {
      torch::NoGradGuard no_grad;
      part = group->SliceOf(each.value(), dim).clone();
    }
    part.requires_grad_();
    PlaceInPlace(each.value(), part, TensorPlacement::Shard(dim), group);
    parts[each.key()] = part;
  }
  return parts;
}

double RelativeDifference(const Tensor& a, const Tensor& b) {
  return (a - b).abs().max().item<double>() /
         std::max(b.abs().max().item<double>(), 1e-30);
}

TESSERA_RANK_FUNCTION(SameAsWhole) {
  const Program& program = Programs().at(std::string(args));
  const auto make = [] {
    torch::manual_seed(3);
    return Net();
  };
  torch::manual_seed(4);
  const Tensor tokens = torch::randint(kWords, {kBatch, kLength});
  Net whole = make();
  const Tensor expected = program(whole, tokens);
  expected.backward();

  Net net = make();
  const auto group = std::make_shared<PartGroup>(world.communicator());
  const std::map<std::string, Tensor> parts = Divide(net, group);
  const Tensor loss = Whole(program(net, tokens));
  loss.backward();
  std::string wrong;
  const double differs = RelativeDifference(loss, expected);
  if (!(differs < 1e-13)) absl::StrAppend(&wrong, "loss by ", differs, "; ");
  for (const auto& each : whole->named_parameters()) {
    const Tensor got = parts.at(each.key()).grad();
    Tensor wanted = each.value().grad();
    if (!wanted.defined() && !got.defined()) continue;
    if (!wanted.defined()) wanted = at::zeros_like(each.value());
    const int64_t dim = DividedAlong(each.key());
    if (dim >= 0) wanted = group->SliceOf(wanted, dim);
    if (!got.defined()) {
      absl::StrAppend(&wrong, each.key(), " has no gradient; ");
      continue;
    }
    // Some gradients are 0 in theory (of a key's bias), and rounding here.
    const double by = (got - wanted).abs().max().item<double>();
    const double most = std::max(wanted.abs().max().item<double>(), 1e-3);
    if (!(by < 1e-12 * most))
      absl::StrAppend(&wrong, each.key(), " by ", by, "; ");
  }
  return wrong;
}

// A view of a tensor that was written through another view has an old history,
// which a function of the user's would go by.
TESSERA_RANK_FUNCTION(ChangedThroughAnotherView) {
  Net net;
  Divide(net, std::make_shared<PartGroup>(world.communicator()));
  const absl::Status status = CatchTorch("reading", [&] {
    const Tensor y = net->a->up(at::ones({2, kDim}, at::kDouble));
    const Tensor first = y.select(0, 0);
    y.select(0, 1).mul_(3);
    Doubled::apply(first).relu();
  });
  return std::string(status.message());
}

TEST(TensorParts, AFunctionOfTheUsersIsNotCutFromTheGraph) {
  for (auto& answer : RankPool::Get(2)->Run("ChangedThroughAnotherView", "")) {
    TESSERA_ASSERT_OK(answer);
    EXPECT_THAT(*answer, HasSubstr("give it a clone()"));
  }
}

// A view that parts do not have is of a copy, which must not be written.
TESSERA_RANK_FUNCTION(WriteToAViewWithoutARule) {
  Net net;
  Divide(net, std::make_shared<PartGroup>(world.communicator()));
  const absl::Status status = CatchTorch("writing", [&] {
    const Tensor y = net->a->up(at::ones({2, kDim}, at::kDouble));
    y.slice(1, 0, 5).mul_(3);
  });
  return std::string(status.message());
}

TEST(TensorParts, AViewWithoutARuleIsNotWritten) {
  for (auto& answer : RankPool::Get(2)->Run("WriteToAViewWithoutARule", "")) {
    TESSERA_ASSERT_OK(answer);
    EXPECT_THAT(*answer, HasSubstr("aten::mul_ would write to a view"));
  }
}

TESSERA_RANK_FUNCTION(TargetOutOfRange) {
  Net net;
  Divide(net, std::make_shared<PartGroup>(world.communicator()));
  const absl::Status status = CatchTorch("loss", [&] {
    F::cross_entropy(net->head(at::ones({2, kDim}, at::kDouble)),
                     at::full({2}, kWords));
  });
  return std::string(status.message());
}

TEST(TensorParts, TargetsOutOfRangeAreErrors) {
  for (auto& answer : RankPool::Get(2)->Run("TargetOutOfRange", "")) {
    TESSERA_ASSERT_OK(answer);
    EXPECT_THAT(*answer, HasSubstr("a target is not that of a class"));
  }
}

class TensorPartsTest
    : public testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(TensorPartsTest, LossAndGradientsAreThoseOfTheWhole) {
  const auto& [program, ranks] = GetParam();
  for (auto& answer : RankPool::Get(ranks)->Run("SameAsWhole", program)) {
    EXPECT_THAT(answer, IsOkAndHolds(""));
  }
}

std::vector<std::string> Names() {
  std::vector<std::string> names;
  for (const auto& [name, program] : Programs()) names.push_back(name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, TensorPartsTest,
                         testing::Combine(testing::ValuesIn(Names()),
                                          testing::Values(2, 3)));

// How many collectives a forward and backward take: Megatron-LM's four a block,
// those of the embedding (1) and of the loss (3: maxima, sums, targets), and
// one for the input's gradient of the head.
TESSERA_RANK_FUNCTION(CountCollectives) {
  torch::manual_seed(3);
  Net net;
  const auto group = std::make_shared<PartGroup>(world.communicator());
  Divide(net, group);
  const Tensor tokens = torch::randint(kWords, {kBatch, kLength});
  Programs().at("transformer")(net, tokens).backward();
  return absl::StrCat(group->collectives());
}

TEST(TensorParts, TakeAsManyCollectivesAsMegatron) {
  for (auto& answer : RankPool::Get(2)->Run("CountCollectives", "")) {
    EXPECT_THAT(answer, IsOkAndHolds(absl::StrCat(2 * 4 + 1 + 3 + 1)));
  }
}

TESSERA_RANK_FUNCTION(PointerOfAPart) {
  Net net;
  Divide(net, std::make_shared<PartGroup>(world.communicator()));
  const absl::Status status =
      CatchTorch("reading", [&] { net->head->weight.data_ptr<double>(); });
  return std::string(status.message());
}

TEST(TensorParts, AreNoMemory) {
  for (auto& answer : RankPool::Get(2)->Run("PointerOfAPart", "")) {
    TESSERA_ASSERT_OK(answer);
    EXPECT_THAT(*answer,
                HasSubstr("divided among the ranks, without a pointer"));
  }
}

}  // namespace
}  // namespace tessera
