#include "examples/gpt/gpt.h"

#include <cmath>

#include "ATen/Context.h"
#include "ATen/Functions.h"
#include "gtest/gtest.h"

namespace {

Gpt SmallGpt(uint64_t seed) {
  at::manual_seed(seed);
  return Gpt(GptOptions().dim(32).layers(2).heads(4).seq(16));
}

at::Tensor RandomTokens(int64_t batch, int64_t length) {
  return at::randint(0, 256, {batch, length}, at::kLong);
}

TEST(GptTest, HasAboutTenMillionParametersByDefault) {
  Gpt model;
  int64_t numel = 0;
  for (const auto& parameter : model->parameters()) numel += parameter.numel();
  EXPECT_GT(numel, 9'000'000);
  EXPECT_LT(numel, 12'000'000);
}

TEST(GptTest, GivesOneRowOfLogitsPerToken) {
  Gpt model = SmallGpt(0);
  EXPECT_EQ(model->forward(RandomTokens(3, 16)).sizes(),
            (std::vector<int64_t>{3, 16, 256}));
  EXPECT_EQ(model->forward(RandomTokens(1, 1)).sizes(),
            (std::vector<int64_t>{1, 1, 256}));
}

TEST(GptTest, LossStartsAtThatOfAUniformGuess) {
  Gpt model = SmallGpt(0);
  const auto loss = model->loss(RandomTokens(8, 16), RandomTokens(8, 16));
  EXPECT_EQ(loss.dim(), 0);
  EXPECT_NEAR(loss.item<double>(), std::log(256.0), 0.1);
}

TEST(GptTest, TheLossIsFloat32InAnyPrecision) {
  Gpt model = SmallGpt(0);
  model->to(at::kBFloat16);
  EXPECT_EQ(model->loss(RandomTokens(2, 16), RandomTokens(2, 16)).scalar_type(),
            at::kFloat);
}

TEST(GptTest, TheSeedDecidesTheModelToTheBit) {
  Gpt first = SmallGpt(7), second = SmallGpt(7), third = SmallGpt(8);
  const auto tokens = RandomTokens(2, 16), targets = RandomTokens(2, 16);
  const auto loss = first->loss(tokens, targets);
  EXPECT_TRUE(at::equal(loss, second->loss(tokens, targets)));
  EXPECT_FALSE(at::equal(loss, third->loss(tokens, targets)));
}

TEST(GptTest, EveryParameterGetsAGradient) {
  Gpt model = SmallGpt(0);
  model->loss(RandomTokens(2, 16), RandomTokens(2, 16)).backward();
  for (const auto& item : model->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_GT(item.value().grad().abs().sum().item<double>(), 0) << item.key();
  }
}

TEST(GptTest, LaterTokensDoNotChangeEarlierLogits) {
  Gpt model = SmallGpt(0);
  auto tokens = RandomTokens(1, 16);
  const auto before = model->forward(tokens);
  tokens[0][15] = (tokens[0][15] + 1) % 256;
  const auto after = model->forward(tokens);
  EXPECT_TRUE(at::allclose(before.slice(1, 0, 15), after.slice(1, 0, 15)));
  EXPECT_FALSE(at::allclose(before.slice(1, 15), after.slice(1, 15)));
}

TEST(GptTest, DropoutActsInTrainingOnly) {
  at::manual_seed(0);
  Gpt model(GptOptions().dim(32).layers(1).heads(4).seq(16).dropout(0.5));
  const auto tokens = RandomTokens(1, 16);
  EXPECT_FALSE(at::equal(model->forward(tokens), model->forward(tokens)));
  model->eval();
  EXPECT_TRUE(at::equal(model->forward(tokens), model->forward(tokens)));
}

TEST(GptTest, RefusesWhatDoesNotFit) {
  EXPECT_THROW(Gpt(GptOptions().dim(32).heads(5)), c10::Error);
  EXPECT_THROW(SmallGpt(0)->forward(RandomTokens(1, 17)), c10::Error);
}

}  // namespace
