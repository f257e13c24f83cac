#include <cstdio>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ATen/Context.h"
#include "ATen/Functions.h"
#include "base/status_matchers.h"
#include "examples/text/generate.h"
#include "examples/text/token_loader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

// The text is written once, since loaders read it ahead.
std::string Text() {
  static const std::string* const path = [] {
    auto* const made = new std::string(::testing::TempDir() + "/text");
    std::ofstream(*made) << "abcdefghijklmnopqrstuvwxyz";
    return made;
  }();
  return *path;
}

TokenTextOptions Options() {
  TokenTextOptions options;
  options.path = Text();
  options.seq = 5;
  return options;
}

std::unique_ptr<tessera::DataLoader> Loader(const TokenTextOptions& options,
                                            int64_t batch_size, int rank = 0,
                                            int world_size = 1) {
  auto text = TokenText::Open(options);
  EXPECT_TRUE(text.ok()) << text.status();
  // It outlives its text.
  return *text->Load(batch_size, rank, world_size, at::kCPU);
}

TEST(TokenTextTest, TargetsAreOneTokenFurtherOn) {
  const auto batch = Loader(Options(), 3)->Next();
  ASSERT_TRUE(batch.ok()) << batch.status();
  const TokenBatch both(batch->tensors[0]);
  EXPECT_EQ(both.tokens.sizes(), at::IntArrayRef({3, 5}));
  EXPECT_TRUE(at::equal(both.tokens + 1, both.targets));
}

TEST(TokenTextTest, AnotherNumberOfRanksGoesOnAtThePlace) {
  const auto one = Loader(Options(), 1);
  const auto second = Loader(Options(), 1, 1, 2);
  ASSERT_TRUE(one->Next().ok() && one->Next().ok());
  ASSERT_TRUE(second->Load(one->State()).ok());
  ASSERT_TRUE(one->Next().ok());
  EXPECT_TRUE(at::equal(one->Next()->tensors[0], second->Next()->tensors[0]));
}

// Five samples: 0 to 3 come in training, the last does not.
TEST(TokenTextTest, WhatIsHeldOutIsNotTrainedOn) {
  TokenTextOptions options = Options();
  options.held_out = 1;
  const auto batch = Loader(options, 4)->Next();
  ASSERT_TRUE(batch.ok());
  EXPECT_EQ(batch->tensors[0].max().item<int64_t>(), 'u');
  const auto held_out = TokenText::Open(options)->HeldOut(0);
  ASSERT_TRUE(held_out.ok());
  EXPECT_EQ(held_out->min().item<int64_t>(), 'u');
}

// A text given to a tokenizer's model would train it on noise.
TEST(TokenTextTest, RefusesBytesForATokenizersVocabulary) {
  TokenTextOptions options = Options();
  options.vocab_size = 128256;
  EXPECT_THAT(TokenText::Open(options).status().message(),
              ::testing::HasSubstr("its tokens are bytes, which mean nothing "
                                   "to a model with a vocabulary of 128256"));
}

TEST(TokenTextTest, RefusesTokensOutsideOfTheVocabulary) {
  TokenTextOptions options = Options();
  options.vocab_size = 'f';
  EXPECT_EQ(Loader(options, 5)->Next().status().code(),
            absl::StatusCode::kInvalidArgument);
  options.seq = 26;
  EXPECT_EQ(TokenText::Open(options).status().message(),
            options.path + ": expected 27 tokens or more, got 26");
}

// A "model" whose likeliest token is the one after the last that it sees.
at::Tensor Next(const at::Tensor& tokens) {
  return 100 * at::one_hot((tokens + 1) % 256, 256);
}

TEST(GenerateTest, WritesTheLikeliestToken) {
  GenerateOptions options;
  options.count = 4;
  options.context = 2;
  for (const double temperature : {0.0, 0.8}) {
    options.temperature = temperature;
    EXPECT_EQ(TextOf(Generate(Next, TokensOf("abc"), options)), "defg");
  }
}

TEST(GenerateTest, ShowsTheModelNoMoreThanItsContext) {
  GenerateOptions options;
  options.count = 5;
  options.context = 3;
  int64_t longest = 0;
  Generate(
      [&](const at::Tensor& tokens) {
        longest = std::max(longest, tokens.size(1));
        return Next(tokens);
      },
      TokensOf("a"), options);
  EXPECT_EQ(longest, 3);
}

// Logits that fall from token 0 on, all of them likely.
at::Tensor Falling(const at::Tensor& tokens) {
  return (-0.01 * at::arange(256)).expand({1, tokens.size(1), 256});
}

TEST(GenerateTest, TheSeedDecidesTheText) {
  GenerateOptions options, other;
  other.seed = options.seed + 1;
  const auto text = Generate(Falling, TokensOf("a"), options);
  at::manual_seed(99);  // the default generator has no say
  EXPECT_EQ(Generate(Falling, TokensOf("a"), options), text);
  EXPECT_NE(Generate(Falling, TokensOf("a"), other), text);
}

TEST(GenerateTest, OneOfTheLikeliestIsTheLikeliest) {
  GenerateOptions cold, narrow;
  cold.temperature = 0;
  narrow.top_k = 1;
  EXPECT_EQ(Generate(Falling, TokensOf("a"), narrow),
            Generate(Falling, TokensOf("a"), cold));
}

TEST(GenerateTest, DrawsFromTheLikeliestAlone) {
  GenerateOptions options;
  options.top_k = 3;
  const auto tokens = Generate(Falling, TokensOf("a"), options);
  EXPECT_EQ(std::set<int64_t>(tokens.begin(), tokens.end()),
            (std::set<int64_t>{0, 1, 2}));
  options.top_k = 1000;  // all of them
  const auto many = Generate(Falling, TokensOf("a"), options);
  EXPECT_GT(std::set<int64_t>(many.begin(), many.end()).size(), 30u);
}

TEST(TextTest, PrintableEscapesWhatATerminalWouldObey) {
  EXPECT_EQ(Printable("a\nb \x1b[31m\xff"), "a\nb \\x1b[31m\\xff");
  EXPECT_EQ(TextOf({97, 300, -1, 255}), "a??\xff");
}

}  // namespace
