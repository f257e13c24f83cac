// The bits of a model that is divided among W ranks are those of one process
// that computes the W parts in turn and adds in rank order, in float32. That
// process is written out here, by plain tensors.

#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "parallel/tensor/placed.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Tensors = std::vector<Tensor>;
using Named = std::map<std::string, Tensor>;

constexpr int64_t kDim = 24, kHeads = 6, kWords = 30, kBatch = 3, kLength = 7;

// ---- one process, part by part ----

// Gives each part a copy; their gradients are added in order.
struct Shared : torch::autograd::Function<Shared> {
  static variable_list forward(AutogradContext* /*context*/, const Tensor& x,
                               int64_t parts) {
    variable_list copies;
    for (int64_t i = 0; i < parts; ++i) copies.push_back(x.clone());
    return copies;
  }
  static variable_list backward(AutogradContext* /*context*/,
                                variable_list gradients) {
    Tensor sum = gradients[0].clone();
    for (size_t i = 1; i < gradients.size(); ++i) sum.add_(gradients[i]);
    return {sum, Tensor()};
  }
};

struct Added : torch::autograd::Function<Added> {
  static Tensor forward(AutogradContext* context, at::TensorList addends) {
    context->saved_data["n"] = static_cast<int64_t>(addends.size());
    Tensor sum = addends[0].clone();
    for (size_t i = 1; i < addends.size(); ++i) sum.add_(addends[i]);
    return sum;
  }
  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    return variable_list(static_cast<size_t>(context->saved_data["n"].toInt()),
                         gradients[0]);
  }
};

Tensor Heads(const Tensor& x, int64_t heads) {
  return x.view({x.size(0), x.size(1), heads, x.size(2) / heads})
      .transpose(1, 2);
}

// Parts of all ranks of each parameter; of one that is whole, itself.
struct ByParts {
  int64_t ranks;
  std::map<std::string, Tensors> parts;

  const Tensor& Get(const std::string& name, int64_t r) const {
    const Tensors& all = parts.at(name);
    return all.size() == 1 ? all[0] : all[static_cast<size_t>(r)];
  }
  Tensor LossOf(const Tensor& tokens, const Tensor& next) const;
};

Tensor ByParts::LossOf(const Tensor& tokens, const Tensor& next) const {
  const auto each = [&](auto make) {
    Tensors all;
    for (int64_t r = 0; r < ranks; ++r) all.push_back(make(r));
    return Added::apply(at::TensorList(all));
  };
  const int64_t words = kWords / ranks;
  const auto elsewhere = [&](const Tensor& own) {
    return own.lt(0).logical_or_(own.ge(words));
  };
  Tensor x = each([&](int64_t r) {
    const Tensor own = tokens - r * words, not_here = elsewhere(own);
    return at::embedding(Get("words.weight", r), own.masked_fill(not_here, 0))
        .masked_fill(not_here.unsqueeze(-1), 0);
  });
  const auto norm = [&](const std::string& name, const Tensor& input) {
    return at::layer_norm(input, {kDim}, Get(name + ".weight", 0),
                          Get(name + ".bias", 0));
  };
  const auto linear = [&](const std::string& name, const Tensor& input,
                          int64_t r) {
    return F::linear(input, Get(name + ".weight", r), Get(name + ".bias", r));
  };
  const variable_list ys = Shared::apply(norm("n1", x), ranks);
  const int64_t heads = kHeads / ranks;
  Tensor added = each([&](int64_t r) {
    const Tensor& y = ys[static_cast<size_t>(r)];
    const Tensor a = at::scaled_dot_product_attention(
        Heads(linear("q", y, r), heads), Heads(linear("k", y, r), heads),
        Heads(linear("v", y, r), heads), {}, 0., true);
    return at::matmul(a.transpose(1, 2).reshape({kBatch, kLength, -1}),
                      Get("o.weight", r).t());
  });
  x = x + added.add_(Get("o.bias", 0));
  const variable_list zs = Shared::apply(norm("n2", x), ranks);
  added = each([&](int64_t r) {
    return at::matmul(F::gelu(linear("up", zs[static_cast<size_t>(r)], r)),
                      Get("down.weight", r).t());
  });
  x = x + added.add_(Get("down.bias", 0));

  const variable_list hs = Shared::apply(x, ranks);
  Tensors logits, most;
  for (int64_t r = 0; r < ranks; ++r) {
    logits.push_back(
        F::linear(hs[static_cast<size_t>(r)], Get("head.weight", r))
            .flatten(0, 1));
    most.push_back(logits.back().detach().amax(1, true));
  }
  const Tensor highest = at::cat(most, 1).amax(1, true);
  for (Tensor& part : logits) part = part - highest;
  const Tensor sums = each(
      [&](int64_t r) { return logits[static_cast<size_t>(r)].exp().sum(1); });
  const Tensor meant = each([&](int64_t r) {
    const Tensor own = next - r * words, not_here = elsewhere(own);
    return logits[static_cast<size_t>(r)]
        .gather(1, own.masked_fill(not_here, 0).unsqueeze(1))
        .squeeze(1)
        .masked_fill(not_here, 0);
  });
  return (sums.log() - meant).sum() / next.numel();
}

// ---- the same as modules, and divided ----

struct NetImpl : nn::Module {
  NetImpl() {
    register_module("words", words);
    for (const auto& [name, layer] : std::map<std::string, nn::Linear*>{
             {"q", &q}, {"k", &k}, {"v", &v}, {"o", &o}}) {
      *layer = register_module(name, nn::Linear(kDim, kDim));
    }
    register_module("n1", n1);
    register_module("n2", n2);
    register_module("up", up);
    register_module("down", down);
    register_module("head", head);
  }
  Tensor LossOf(const Tensor& tokens, const Tensor& next) {
    Tensor x = words(tokens);
    const Tensor y = n1(x);
    const Tensor a = at::scaled_dot_product_attention(
        Heads(q(y), kHeads), Heads(k(y), kHeads), Heads(v(y), kHeads), {}, 0.,
        true);
    x = x + o(a.transpose(1, 2).reshape(x.sizes()));
    x = x + down(F::gelu(up(n2(x))));
    return F::cross_entropy(head(x).flatten(0, 1), next);
  }
  nn::Embedding words{kWords, kDim};
  nn::LayerNorm n1{nn::LayerNormOptions({kDim})},
      n2{nn::LayerNormOptions({kDim})};
  nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr};
  nn::Linear up{kDim, 4 * kDim}, down{4 * kDim, kDim};
  nn::Linear head{nn::LinearOptions(kDim, kWords).bias(false)};
};
TORCH_MODULE(Net);

int64_t DividedAlong(const std::string& name) {
  if (name == "o.weight" || name == "down.weight") return 1;
  for (const char* const whole : {"n1.", "n2.", "o.bias", "down.bias"}) {
    if (name.rfind(whole, 0) == 0) return -1;
  }
  return 0;
}

TESSERA_RANK_FUNCTION(SameBitsAsByParts) {
  torch::manual_seed(3);
  Net net;
  const Tensor tokens = torch::randint(kWords, {kBatch, kLength});
  const Tensor next = torch::randint(kWords, {kBatch * kLength});
  const auto group = std::make_shared<PartGroup>(world.communicator());
  ByParts by_parts{group->size(), {}};
  Named mine;
  for (const auto& each : net->named_parameters()) {
    const int64_t dim = DividedAlong(each.key());
    Tensors& parts = by_parts.parts[each.key()];
    torch::NoGradGuard no_grad;
    const Tensor values = each.value().detach();
    if (dim < 0) {
      parts = {values.clone().requires_grad_()};
      mine[each.key()] = each.value();
      continue;
    }
    for (const Tensor& part : values.chunk(group->size(), dim)) {
      parts.push_back(part.clone().requires_grad_());
    }
    const Tensor part = group->SliceOf(values, dim).clone().requires_grad_();
    PlaceInPlace(each.value(), part, TensorPlacement::Shard(dim), group);
    mine[each.key()] = part;
  }
  const Tensor expected = by_parts.LossOf(tokens, next);
  expected.backward();
  const Tensor loss = net->LossOf(tokens, next);
  loss.backward();
  std::string differ;
  if (!at::equal(loss, expected)) absl::StrAppend(&differ, "loss; ");
  for (const auto& [name, part] : mine) {
    const Tensor& wanted = by_parts.Get(name, group->rank()).grad();
    if (!part.grad().defined() || !at::equal(part.grad(), wanted)) {
      absl::StrAppend(&differ, name, "; ");
    }
  }
  return differ;
}

class TensorBitsTest : public testing::TestWithParam<int> {};

TEST_P(TensorBitsTest, AreThoseOfOneProcessByParts) {
  for (auto& answer : RankPool::Get(GetParam())->Run("SameBitsAsByParts", "")) {
    EXPECT_THAT(answer, IsOkAndHolds(""));
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, TensorBitsTest, testing::Values(1, 2, 3));

}  // namespace
}  // namespace tessera
