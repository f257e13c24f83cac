#include "data/text/document_index.h"

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

constexpr uint16_t E = 99;  // the end-of-text token

// A corpus of uint16 files.
TokenCorpus Corpus(const std::vector<std::vector<uint16_t>>& files) {
  std::vector<std::string> paths;
  for (const std::vector<uint16_t>& file : files) {
    paths.push_back(
        WriteTestFile(absl::StrCat("f", paths.size()), BytesOf(file)));
  }
  absl::StatusOr<TokenCorpus> corpus =
      TokenCorpus::OpenFiles(paths, {TokenType::kUint16, 0});
  TESSERA_EXPECT_OK(corpus);
  return *std::move(corpus);
}

std::vector<int64_t> Ends(const DocumentIndex& index) {
  std::vector<int64_t> ends;
  for (int64_t i = 0; i < index.num_documents(); ++i) {
    EXPECT_EQ(index.begin(i), i == 0 ? 0 : ends.back());
    ends.push_back(index.end(i));
  }
  return ends;
}

std::vector<int64_t> Built(const std::vector<std::vector<uint16_t>>& files,
                           EndTokenPlace place) {
  absl::StatusOr<DocumentIndex> index =
      DocumentIndex::Build(Corpus(files), E, place);
  TESSERA_EXPECT_OK(index);
  return Ends(*index);
}

TEST(DocumentIndex, DocumentsEndWithTheirToken) {
  constexpr auto kAtEnd = EndTokenPlace::kAtEnd;
  EXPECT_THAT(Built({{1, 2, E, 3, E}}, kAtEnd), ElementsAre(3, 5));
  EXPECT_THAT(Built({{1, E, 3}}, kAtEnd), ElementsAre(2, 3));
  EXPECT_THAT(Built({{E, E}}, kAtEnd), ElementsAre(1, 2));
  // Documents go over the borders of files.
  EXPECT_THAT(Built({{1, 2}, {3, E, 4}, {E}}, kAtEnd), ElementsAre(4, 6));
}

TEST(DocumentIndex, OrBeginWithIt) {
  constexpr auto kAtBegin = EndTokenPlace::kAtBegin;
  EXPECT_THAT(Built({{E, 1, 2, E, 3}}, kAtBegin), ElementsAre(3, 5));
  EXPECT_THAT(Built({{1, E, 3}}, kAtBegin), ElementsAre(1, 3));
  EXPECT_THAT(Built({{E, E, 1}}, kAtBegin), ElementsAre(1, 3));
  EXPECT_THAT(Built({{E, 1}}, kAtBegin), ElementsAre(2));
  EXPECT_THAT(Built({{E}, {1, 2}, {E, E}}, kAtBegin), ElementsAre(3, 4, 5));
}

// The token may be at every place of a block, in tokens of every type.
TEST(DocumentIndex, FindsTheTokenAnywhere) {
  for (const TokenType type :
       {TokenType::kUint8, TokenType::kUint16, TokenType::kUint32}) {
    const auto bytes = static_cast<size_t>(TokenBytes(type));
    for (size_t at = 0; at < 600; at += 37) {
      std::string content(600 * bytes, '\0');
      content[at * bytes] = E;
      TESSERA_ASSERT_OK_AND_ASSIGN(
          const TokenCorpus corpus,
          TokenCorpus::OpenFiles({WriteTestFile("f", content)}, {type, 0}));
      TESSERA_ASSERT_OK_AND_ASSIGN(const DocumentIndex index,
                                   DocumentIndex::Build(corpus, E));
      EXPECT_THAT(Ends(index), ElementsAre(at + 1, 600));
    }
  }
}

TEST(DocumentIndex, DocumentOfAToken) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const DocumentIndex index,
                               DocumentIndex::FromEnds({2, 3, 7}, 7));
  std::vector<int64_t> documents;
  for (int64_t i = 0; i < 7; ++i) documents.push_back(index.DocumentOf(i));
  EXPECT_THAT(documents, ElementsAre(0, 0, 1, 2, 2, 2, 2));
  EXPECT_FALSE(index.end_token().has_value());
}

TEST(DocumentIndex, WhatCannotBeIsRefused) {
  const TokenCorpus corpus = Corpus({{1, 2, 3}});
  for (const int64_t end : {int64_t{99}, int64_t{-1}, int64_t{65537}}) {
    EXPECT_THAT(
        DocumentIndex::Build(corpus, end),
        StatusIs(StatusCode::kInvalidArgument,
                 HasSubstr(absl::StrCat("the end-of-text token ", end,
                                        " is nowhere among 3 tokens"))));
  }
  EXPECT_THAT(DocumentIndex::FromEnds({2, 2, 7}, 7),
              StatusIs(StatusCode::kInvalidArgument,
                       "document 1 ends at token 2, expected more than 2"));
  EXPECT_THAT(DocumentIndex::FromEnds({0, 7}, 7),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("document 0")));
  EXPECT_THAT(DocumentIndex::FromEnds({2, 6}, 7),
              StatusIs(StatusCode::kInvalidArgument,
                       "the last of 2 documents ends at token 6, expected 7"));
  EXPECT_FALSE(DocumentIndex::FromEnds({}, 7).ok());
  EXPECT_FALSE(DocumentIndex::FromEnds({}, 0).ok());
}

class SavedIndex : public ::testing::Test {
 protected:
  SavedIndex() : corpus_(Corpus({{1, 2, E, 3, E, 4}})), path_(TestPath("i")) {
    absl::StatusOr<DocumentIndex> index = DocumentIndex::Build(corpus_, E);
    TESSERA_EXPECT_OK(index);
    TESSERA_EXPECT_OK(index->Save(path_));
    saved_ = ReadBytes(path_);
  }

  const TokenCorpus corpus_;
  const std::string path_;
  std::string saved_;
};

TEST_F(SavedIndex, ComesBack) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const DocumentIndex index,
                               DocumentIndex::Load(path_, corpus_));
  EXPECT_THAT(Ends(index), ElementsAre(3, 5, 6));
  EXPECT_EQ(index.end_token(), E);
  EXPECT_EQ(index.place(), EndTokenPlace::kAtEnd);
  EXPECT_EQ(index.DocumentOf(4), 1);
  TESSERA_EXPECT_OK(index.Save(path_));  // over itself
  EXPECT_EQ(ReadBytes(path_), saved_);
}

TEST_F(SavedIndex, OfFromEndsAndOfBegins) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const DocumentIndex known,
                               DocumentIndex::FromEnds({1, 6}, 6));
  TESSERA_ASSERT_OK(known.Save(path_));
  TESSERA_ASSERT_OK_AND_ASSIGN(const DocumentIndex loaded,
                               DocumentIndex::Load(path_, corpus_));
  EXPECT_THAT(Ends(loaded), ElementsAre(1, 6));
  EXPECT_FALSE(loaded.end_token().has_value());
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const DocumentIndex begins,
      DocumentIndex::Build(corpus_, E, EndTokenPlace::kAtBegin));
  TESSERA_ASSERT_OK(begins.Save(path_));
  TESSERA_ASSERT_OK_AND_ASSIGN(const DocumentIndex again,
                               DocumentIndex::Load(path_, corpus_));
  EXPECT_THAT(Ends(again), ElementsAre(2, 4, 6));
  EXPECT_EQ(again.place(), EndTokenPlace::kAtBegin);
}

TEST_F(SavedIndex, IsRefusedWithAnotherCorpus) {
  EXPECT_THAT(DocumentIndex::Load(path_, Corpus({{1, 2, E, 3, E}})),
              StatusIs(StatusCode::kFailedPrecondition,
                       path_ + ": is of 6 tokens, the corpus has 5; build it "
                               "again"));
  EXPECT_THAT(DocumentIndex::Load(path_, Corpus({{1, 2, 3}, {E, E, 4}})),
              StatusIs(StatusCode::kFailedPrecondition,
                       HasSubstr("f0: token 2 is 3, expected the end-of-text "
                                 "token 99")));
  EXPECT_THAT(DocumentIndex::Load("/nowhere", corpus_),
              StatusIs(StatusCode::kNotFound));
}

// Every bit counts.
TEST_F(SavedIndex, TruncatedAndFlippedFilesAreRefused) {
  for (size_t length = 0; length < saved_.size(); ++length) {
    WriteBytes(path_, saved_.substr(0, length));
    EXPECT_FALSE(DocumentIndex::Load(path_, corpus_).ok()) << length;
  }
  WriteBytes(path_, saved_ + "12345678");
  EXPECT_THAT(DocumentIndex::Load(path_, corpus_),
              StatusIs(StatusCode::kDataLoss, StartsWith(path_ + ": byte 16")));
  for (size_t bit = 0; bit < 8 * saved_.size(); ++bit) {
    std::string flipped = saved_;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
    WriteBytes(path_, flipped);
    EXPECT_FALSE(DocumentIndex::Load(path_, corpus_).ok()) << bit;
  }
}

}  // namespace
}  // namespace tessera
