#include "data/text/token_corpus.h"

#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "data/test_files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr TokenFileOptions kUint16 = {TokenType::kUint16, 0};

// Writes tokens 0, 1, 2, ... to files of these sizes.
std::vector<std::string> WriteShards(const std::vector<int>& sizes) {
  std::vector<std::string> paths;
  uint16_t next = 0;
  for (const int size : sizes) {
    std::vector<uint16_t> tokens(static_cast<size_t>(size));
    for (uint16_t& token : tokens) token = next++;
    paths.push_back(WriteTestFile(absl::StrCat("s", paths.size(), ".bin"),
                                  BytesOf(tokens)));
  }
  return paths;
}

TEST(TokenCorpus, SamplesShareTheirBorderToken) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const TokenCorpus corpus,
      TokenCorpus::OpenFiles(WriteShards({9}), kUint16));
  EXPECT_EQ(corpus.num_tokens(), 9);
  EXPECT_EQ(corpus.num_samples(4), 2);
  EXPECT_EQ(corpus.num_samples(8), 1);
  EXPECT_EQ(corpus.num_samples(9), 0);
  std::vector<int64_t> out(5);
  TESSERA_ASSERT_OK(corpus.CopySample(1, 4, absl::MakeSpan(out)));
  EXPECT_THAT(out, ElementsAre(4, 5, 6, 7, 8));
  EXPECT_DEATH((void)corpus.CopySample(2, 4, absl::MakeSpan(out)), "2 vs 2");
  EXPECT_DEATH((void)corpus.CopySample(0, 3, absl::MakeSpan(out)), "5 vs 4");
}

// Samples are read in any order and over any borders of files, shorter and
// longer than what was prefetched.
TEST(TokenCorpus, SamplesOfABatchAreThoseAlone) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const TokenCorpus corpus,
      TokenCorpus::OpenFiles(WriteShards({7000, 3, 29000}), kUint16));
  for (const int64_t seq_len : {1, 70, 6001}) {
    std::vector<int64_t> indices;
    for (int64_t i = 0; i < 20; ++i) {
      indices.push_back((i * 7 + 3) % corpus.num_samples(seq_len));
    }
    const auto length = static_cast<size_t>(seq_len) + 1;
    std::vector<int64_t> wide(indices.size() * length);
    std::vector<int32_t> narrow(wide.size());
    TESSERA_ASSERT_OK(
        corpus.CopySamples(indices, seq_len, absl::MakeSpan(wide)));
    TESSERA_ASSERT_OK(
        corpus.CopySamples(indices, seq_len, absl::MakeSpan(narrow)));
    std::vector<int64_t> alone(length);
    for (size_t i = 0; i < indices.size(); ++i) {
      TESSERA_ASSERT_OK(
          corpus.CopySample(indices[i], seq_len, absl::MakeSpan(alone)));
      for (size_t k = 0; k < length; ++k) {
        ASSERT_EQ(alone[k], indices[i] * seq_len + static_cast<int64_t>(k));
        ASSERT_EQ(wide[i * length + k], alone[k]);
        ASSERT_EQ(narrow[i * length + k], alone[k]);
      }
    }
  }
  std::vector<int64_t> out(10);
  EXPECT_DEATH((void)corpus.CopySamples({0, 1}, 5, absl::MakeSpan(out)),
               "10 vs 12");
}

// Whatever the tokens are cut into, samples are the same.
TEST(TokenCorpus, FilesChangeNothing) {
  for (const std::vector<int>& sizes :
       {std::vector<int>{20}, {7, 13}, {1, 1, 17, 1}, {10, 10}, {3, 2, 15}}) {
    TESSERA_ASSERT_OK_AND_ASSIGN(
        const TokenCorpus corpus,
        TokenCorpus::OpenFiles(WriteShards(sizes), kUint16));
    for (const int64_t seq_len : {1, 2, 3, 7, 19}) {
      ASSERT_EQ(corpus.num_samples(seq_len), 19 / seq_len);
      std::vector<int64_t> out(static_cast<size_t>(seq_len) + 1);
      std::vector<int64_t> expected(out.size());
      for (int64_t i = 0; i < corpus.num_samples(seq_len); ++i) {
        TESSERA_ASSERT_OK(corpus.CopySample(i, seq_len, absl::MakeSpan(out)));
        std::iota(expected.begin(), expected.end(), i * seq_len);
        EXPECT_EQ(out, expected);
      }
    }
  }
}

TEST(TokenCorpus, FilesOfSeveralFormatsByPattern) {
  const std::string folder = TestFolder("d");
  TESSERA_ASSERT_OK_AND_ASSIGN(std::string header,
                               TokenHeader(TokenType::kUint32, 2));
  WriteBytes(folder + "/b.bin", header + BytesOf<uint32_t>({70000, 70001}));
  WriteBytes(folder + "/a.bin", BytesOf<uint16_t>({1, 2, 3}));
  WriteBytes(folder + "/other.txt", "x");
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const TokenCorpus corpus,
      TokenCorpus::Open(folder + "/*.bin", {TokenType::kUint16, 70001}));
  ASSERT_EQ(corpus.num_tokens(), 5);
  std::vector<int64_t> out(4);
  TESSERA_ASSERT_OK(corpus.CopyTokens(0, absl::MakeSpan(out)));
  EXPECT_THAT(out, ElementsAre(1, 2, 3, 70000));
  EXPECT_THAT(corpus.CopyTokens(1, absl::MakeSpan(out)),
              StatusIs(StatusCode::kInvalidArgument,
                       StartsWith(folder + "/b.bin: token 1 (byte 1028) is "
                                           "70001, the vocabulary has 70001")));
  EXPECT_EQ(corpus.Describe(2), folder + "/a.bin: token 2");
  EXPECT_EQ(corpus.Describe(3), folder + "/b.bin: token 0");
}

TEST(TokenCorpus, BadSetsAreRefused) {
  EXPECT_THAT(TokenCorpus::OpenFiles({}, kUint16),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("got none")));
  EXPECT_THAT(TokenCorpus::Open(TestFolder("d") + "/*.bin", kUint16),
              StatusIs(StatusCode::kNotFound, HasSubstr("matches no file")));
  std::vector<std::string> paths = WriteShards({4});
  paths.push_back(WriteTestFile("odd", "abc"));
  EXPECT_THAT(
      TokenCorpus::OpenFiles(paths, kUint16),
      StatusIs(StatusCode::kDataLoss, StartsWith("token corpus: " + paths[1])));
  EXPECT_THAT(TokenCorpus::Open("/nowhere", kUint16),
              StatusIs(StatusCode::kNotFound,
                       StartsWith("token corpus: /nowhere: No such file")));
}

}  // namespace
}  // namespace tessera
