#include "data/sentencepiece/sentencepiece_tokenizer.h"

#include <memory>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "data/sentencepiece/train_model_test_util.h"
#include "data/test_files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Lt;
using ::testing::Not;
using ::testing::StartsWith;

constexpr char kText[] =
    "the cat sat on the mat and the dog sat on the cat\n"
    "the dog and the cat ran to the mat and the mat was flat\n"
    "a rat sat on a hat that was on the mat that the cat had\n";

class SentencePiece : public ::testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<Tokenizer> Train() {
    const std::string text = WriteTestFile("text", kText);
    const std::string prefix = TestPath("m");
    EXPECT_EQ(TrainSentencePiece(text, prefix, GetParam(), 26), "");
    absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer =
        SentencePieceTokenizer::Open(prefix + ".model");
    TESSERA_EXPECT_OK(tokenizer);
    return *std::move(tokenizer);
  }
};

TEST_P(SentencePiece, TextComesBack) {
  const std::unique_ptr<Tokenizer> tokenizer = Train();
  EXPECT_EQ(tokenizer->vocab_size(), 26);
  EXPECT_EQ(tokenizer->unk_id(), 0);
  EXPECT_EQ(tokenizer->bos_id(), 1);
  EXPECT_EQ(tokenizer->eos_id(), 2);
  std::vector<int32_t> ids;
  TESSERA_ASSERT_OK(tokenizer->Encode("the cat and the hat", &ids));
  EXPECT_THAT(ids, Not(IsEmpty()));
  EXPECT_LT(ids.size(), 19u);  // fewer than letters
  EXPECT_THAT(ids, Each(Lt(26)));
  EXPECT_THAT(tokenizer->Decode(ids), IsOkAndHolds("the cat and the hat"));
  const size_t before = ids.size();
  TESSERA_ASSERT_OK(tokenizer->Encode("the cat and the hat", &ids));
  EXPECT_EQ(ids.size(), 2 * before);  // appended
  ids.clear();
  TESSERA_ASSERT_OK(tokenizer->Encode("Q", &ids));
  EXPECT_EQ(ids.back(), tokenizer->unk_id());
  EXPECT_THAT(tokenizer->Decode({3, 26}),
              StatusIs(StatusCode::kInvalidArgument,
                       "token 1 is 26, the vocabulary has 26"));
  EXPECT_FALSE(tokenizer->Decode({-1}).ok());
}

INSTANTIATE_TEST_SUITE_P(Models, SentencePiece,
                         ::testing::Values("bpe", "unigram"),
                         [](const auto& info) { return info.param; });

TEST(SentencePieceFile, OthersAreRefused) {
  EXPECT_THAT(SentencePieceTokenizer::Open("/nowhere/m.model"),
              StatusIs(StatusCode::kNotFound, StartsWith("/nowhere/m.model")));
  const std::string path = WriteTestFile("m", "this is no model");
  EXPECT_THAT(SentencePieceTokenizer::Open(path),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr(path + ": is no SentencePiece model")));
}

}  // namespace
}  // namespace tessera
