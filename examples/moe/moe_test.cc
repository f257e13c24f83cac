#include "examples/moe/moe.h"

#include <cmath>
#include <numeric>
#include <string>

#include "ATen/Context.h"
#include "ATen/Functions.h"
#include "gtest/gtest.h"

namespace {

MoeOptions Small() {
  return MoeOptions()
      .dim(16)
      .layers(2)
      .heads(2)
      .experts(6)
      .hidden(24)
      .seq(8)
      .vocab(11);
}

at::Tensor Tokens(int64_t batch) {
  return (at::arange(8 * batch, at::kLong).pow(2) % 11).view({batch, 8});
}

TEST(MoeTest, EachTokenTakesTwoExperts) {
  at::manual_seed(1);
  MoeLayer layer(Small());
  layer->forward(at::randn({40, 16}));
  const auto& choices = layer->choices();
  EXPECT_EQ(std::accumulate(choices.begin(), choices.end(), int64_t{0}), 80);
}

// This computes the definition, token by token.
TEST(MoeTest, IsTheWeightedSumOfTheChosen) {
  const at::NoGradGuard no_grad;
  at::manual_seed(2);
  MoeLayer layer(Small());
  const at::Tensor input = at::randn({5, 16});
  const at::Tensor got = layer->forward(input);
  const auto parameters = layer->named_parameters();
  for (int64_t i = 0; i < 5; ++i) {
    const at::Tensor x = input[i];
    const at::Tensor p = at::softmax(at::mv(parameters["router.weight"], x), 0);
    const auto [top, which] = at::topk(p, 2);
    at::Tensor expected = at::zeros({16});
    for (int64_t k = 0; k < 2; ++k) {
      const std::string expert =
          "experts." + std::to_string(which[k].item<int64_t>());
      expected +=
          at::mv(parameters[expert + ".down.weight"],
                 at::gelu(at::mv(parameters[expert + ".up.weight"], x))) *
          (top[k] / top.sum());
    }
    // Sums of 16, 24, 6 and 2 products, in either order.
    EXPECT_LE((got[i] - expected).abs().max().item<double>(),
              48 * 1.2e-7 * expected.abs().max().item<double>());
  }
}

TEST(MoeTest, ExpertsWithoutATokenGetNoGradient) {
  at::manual_seed(3);
  Moe model(Small());
  const at::Tensor one = Tokens(1).slice(1, 0, 1);
  model->loss(one, one).backward();
  // One token takes 2 of the 6 experts in each of two layers.
  EXPECT_EQ(model->unused_experts(), 8);
  int64_t without = 0;
  for (const auto& item : model->named_parameters()) {
    if (!item.value().grad().defined()) {
      ++without;
      EXPECT_NE(item.key().find("experts"), std::string::npos) << item.key();
    }
  }
  EXPECT_EQ(without, 16);
}

// The balancing loss is 1 where the router has no preference in the mean, and
// the number of experts, at the most, where two have all tokens.
TEST(MoeTest, BalanceIsLeastWhereExpertsAreChosenEquallyOften) {
  const at::NoGradGuard no_grad;
  MoeLayer layer(MoeOptions().dim(2).heads(1).experts(2).hidden(4));
  layer->forward(at::randn({64, 2}));
  EXPECT_NEAR(layer->balance_loss().item<double>(), 1, 1e-6);  // both always
  MoeLayer many(Small());
  auto router = many->named_parameters()["router.weight"];
  router.zero_();
  router[0].fill_(4);
  router[1].fill_(3.9);
  many->forward(at::ones({64, 16}));
  EXPECT_GT(many->balance_loss().item<double>(), 2.9);
}

// 515 tokens, of which bfloat16 would make 516.
TEST(MoeTest, TheRouterIsFloat32InAnyPrecision) {
  const at::NoGradGuard no_grad;
  MoeLayer layer(Small());
  auto router = layer->named_parameters()["router.weight"];
  router.zero_();
  router[0].fill_(0.25);
  router[1].fill_(0.125);
  const at::Tensor input = at::ones({515, 16});
  layer->forward(input);
  const at::Tensor expected = layer->balance_loss();
  layer->to(at::kBFloat16);
  EXPECT_EQ(layer->forward(input.to(at::kBFloat16)).scalar_type(),
            at::kBFloat16);
  EXPECT_EQ(layer->choices()[0], 515);
  EXPECT_EQ(layer->balance_loss().scalar_type(), at::kFloat);
  EXPECT_EQ(layer->balance_loss().item<float>(), expected.item<float>());
}

TEST(MoeTest, TheLossIsFloat32AndHasTwoParts) {
  at::manual_seed(5);
  Moe model(Small().balance(0.5));
  model->to(at::kBFloat16);
  const at::Tensor loss = model->loss(Tokens(4), Tokens(4));
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  // Two layers of half a balance of about 1 each; sums of three terms.
  EXPECT_NEAR(loss.item<double>(),
              (model->cross_entropy() + 0.5 * model->balance()).item<double>(),
              4 * 0x1p-24 * loss.item<double>());
  EXPECT_FALSE(model->cross_entropy().requires_grad());
  loss.backward();
}

TEST(MoeTest, LossStartsAtThatOfAUniformGuess) {
  at::manual_seed(4);
  Moe model(Small().balance(0));
  EXPECT_NEAR(model->loss(Tokens(4), Tokens(4)).item<double>(), std::log(11.0),
              0.1);
}

}  // namespace
