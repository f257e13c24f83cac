#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "base/status_matchers.h"
#include "examples/text/generate.h"
#include "examples/text/token_batches.h"
#include "gtest/gtest.h"

namespace {

std::string Text() {
  const std::string path = ::testing::TempDir() + "/text";
  std::ofstream(path) << "abcdefghijklmnopqrstuvwxyz";
  return path;
}

TokenBatchesOptions Options(int rank, int world_size) {
  TokenBatchesOptions options;
  options.path = Text();
  options.seq = 5;
  options.rank = rank;
  options.world_size = world_size;
  return options;
}

TEST(TokenBatchesTest, TargetsAreOneTokenFurtherOn) {
  auto batches = TokenBatches::Open(Options(0, 1));
  ASSERT_TRUE(batches.ok()) << batches.status();
  const auto batch = batches->Next(3, at::kCPU);
  ASSERT_TRUE(batch.ok()) << batch.status();
  EXPECT_EQ(batch->tokens.sizes(), at::IntArrayRef({3, 5}));
  EXPECT_TRUE(at::equal(batch->tokens + 1, batch->targets));
}

TEST(TokenBatchesTest, AnotherNumberOfRanksGoesOnAtThePlace) {
  auto one = TokenBatches::Open(Options(0, 1));
  auto second = TokenBatches::Open(Options(1, 2));
  ASSERT_TRUE(one.ok() && second.ok());
  ASSERT_TRUE(one->Next(2, at::kCPU).ok());
  ASSERT_TRUE(second->Seek(one->Place()).ok());
  ASSERT_TRUE(one->Next(1, at::kCPU).ok());
  EXPECT_TRUE(at::equal(one->Next(1, at::kCPU)->tokens,
                        second->Next(1, at::kCPU)->tokens));
}

TEST(TokenBatchesTest, RefusesThePlaceOfOtherData) {
  TokenBatchesOptions other = Options(0, 1);
  other.seed = 7;
  auto one = TokenBatches::Open(Options(0, 1));
  auto two = TokenBatches::Open(other);
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_EQ(two->Seek(one->Place()).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(two->Seek("here").code(), absl::StatusCode::kDataLoss);
}

TEST(TokenBatchesTest, RefusesTokensOutsideOfTheVocabulary) {
  TokenBatchesOptions options = Options(0, 1);
  options.vocab_size = 'f';
  auto batches = TokenBatches::Open(options);
  ASSERT_TRUE(batches.ok());
  EXPECT_EQ(batches->Next(5, at::kCPU).status().code(),
            absl::StatusCode::kInvalidArgument);
  options.seq = 26;
  EXPECT_EQ(TokenBatches::Open(options).status().message(),
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

}  // namespace
