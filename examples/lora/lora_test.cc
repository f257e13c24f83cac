#include "examples/lora/lora.h"

#include <string>

#include "ATen/Context.h"
#include "ATen/Functions.h"
#include "examples/gpt/gpt.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

using ::testing::ElementsAre;

Gpt SmallGpt() {
  at::manual_seed(1);
  return Gpt(GptOptions().dim(16).layers(2).heads(2).seq(8).vocab(11));
}

at::Tensor Tokens() {
  return (at::arange(16, at::kLong).pow(2) % 11).view({2, 8});
}

LoraOptions Options(std::vector<std::string> targets) {
  LoraOptions options;
  options.rank = 3;
  options.alpha = 6;
  options.targets = std::move(targets);
  return options;
}

TEST(LoraTest, ChoosesByTheEndsOfPaths) {
  Gpt all = SmallGpt(), some = SmallGpt(), deep = SmallGpt();
  EXPECT_THAT((*Lora::Add(all.get(), Options({"qkv"})))->paths(),
              ElementsAre("blocks.0.qkv", "blocks.1.qkv"));
  EXPECT_THAT((*Lora::Add(some.get(), Options({"1.up", "head"})))->paths(),
              ElementsAre("blocks.1.up", "head"));
  EXPECT_THAT((*Lora::Add(deep.get(), Options({"blocks.*.out"})))->paths(),
              ElementsAre("blocks.0.out", "blocks.1.out"));
}

TEST(LoraTest, RefusesATargetThatNothingFits) {
  Gpt model = SmallGpt();
  EXPECT_EQ(Lora::Add(model.get(), Options({"qkv", "kv"})).status().message(),
            "lora: no Linear of the model fits the target 'kv'");
  LoraOptions none;
  none.rank = 0;
  EXPECT_FALSE(Lora::Add(model.get(), none).ok());
}

TEST(LoraTest, OnlyAdaptersAreTrained) {
  Gpt model = SmallGpt();
  const auto lora = Lora::Add(model.get(), Options({"qkv"}));
  ASSERT_TRUE(lora.ok());
  const Lora::Scope scope(**lora);
  model->loss(Tokens(), Tokens()).backward();
  int64_t trained = 0;
  for (const auto& item : model->named_parameters()) {
    const bool adapter = item.key().find("lora_") != std::string::npos;
    EXPECT_EQ(item.value().grad().defined(), adapter) << item.key();
    trained += adapter ? 1 : 0;
  }
  EXPECT_EQ(trained, 4);
}

// Every Linear of every shape of input, with a bias and without one: what the
// scope adds is what the weight W + alpha / rank * B A gives.
TEST(LoraTest, AddsWhatTheMergedWeightWould) {
  Gpt model = SmallGpt(), merged = SmallGpt();
  const auto lora =
      Lora::Add(model.get(), Options({"qkv", "out", "up", "down", "head"}));
  ASSERT_TRUE(lora.ok());
  const at::NoGradGuard no_grad;
  auto theirs = merged->named_parameters();
  for (const auto& item : model->named_parameters()) {
    const std::string suffix = ".lora_B.weight";
    const size_t at = item.key().find(suffix);
    if (at == std::string::npos) continue;
    const std::string layer = item.key().substr(0, at);
    item.value().normal_(0, 0.3);
    const at::Tensor a = model->named_parameters()[layer + ".lora_A.weight"];
    theirs[layer + ".weight"].add_(at::matmul(item.value(), a), 2);
  }
  const at::Tensor plain = model->forward(Tokens());
  const at::Tensor expected = merged->forward(Tokens());
  const Lora::Scope scope(**lora);
  const at::Tensor got = model->forward(Tokens());
  const auto far = [&](const at::Tensor& x) {
    return ((x - expected).abs().max() / expected.abs().max()).item<double>();
  };
  EXPECT_GT(far(plain), 0.1);
  // 2 layers of 4 Linears and the head, each a sum over 64 at most, in either
  // form off by at most so many roundings.
  EXPECT_LT(far(got), 9 * 64 * 6e-8);
}

TEST(LoraTest, ATwoDimensionalInputHasItsPartToo) {
  torch::nn::Sequential model(torch::nn::Linear(4, 3));
  const auto lora = Lora::Add(model.ptr().get(), Options({"0"}));
  ASSERT_TRUE(lora.ok());
  const at::NoGradGuard no_grad;
  for (const auto& item : model->named_parameters()) {
    if (item.key().find("lora_") != std::string::npos) item.value().fill_(1);
  }
  const at::Tensor x = at::ones({2, 4});
  const at::Tensor plain = model->forward(x);
  const Lora::Scope scope(**lora);
  // Each of 3 in the middle is 4, their sum 12, times 6 / 3.
  EXPECT_TRUE(at::allclose(model->forward(x), plain + 24));
}

}  // namespace
