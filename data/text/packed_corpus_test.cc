#include "data/text/packed_corpus.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/bits.h"
#include "base/status_matchers.h"
#include "data/test_files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kNone = kIgnoreIndex;

std::vector<int64_t> Lengths(const PackedPieces& packed, size_t bin) {
  std::vector<int64_t> lengths;
  for (uint32_t i = packed.firsts[bin]; i < packed.firsts[bin + 1]; ++i) {
    lengths.push_back(packed.pieces[i].length());
  }
  return lengths;
}

std::vector<TextPiece> Pieces(const std::vector<int64_t>& lengths) {
  std::vector<TextPiece> pieces;
  int64_t begin = 0;
  for (const int64_t length : lengths) {
    pieces.emplace_back(begin, length);
    begin += length;
  }
  return pieces;
}

TEST(TextPiece, HoldsItsRange) {
  const TextPiece largest(TextPiece::kMaxBegin, TextPiece::kMaxLength);
  EXPECT_EQ(largest.begin(), (int64_t{1} << 44) - 1);
  EXPECT_EQ(largest.length(), 1048576);
  const TextPiece least(0, 1);
  EXPECT_EQ(least.begin(), 0);
  EXPECT_EQ(least.length(), 1);
}

TEST(PackBestFit, TakesTheLeastRoomThatFits) {
  // 7 opens a bin (room 3), 6 another (room 4); 4 fits the second exactly, 3
  // the first; 2 opens a third.
  const PackedPieces packed = PackBestFit(Pieces({2, 3, 4, 6, 7}), 10);
  ASSERT_EQ(packed.firsts.size(), 4u);
  EXPECT_THAT(Lengths(packed, 0), ElementsAre(7, 3));
  EXPECT_THAT(Lengths(packed, 1), ElementsAre(6, 4));
  EXPECT_THAT(Lengths(packed, 2), ElementsAre(2));
  EXPECT_EQ(packed.pieces[0].begin(), 15);
}

TEST(PackBestFit, AtTheBorders) {
  EXPECT_EQ(PackBestFit({}, 10).firsts.size(), 1u);
  EXPECT_EQ(PackBestFit(Pieces({1}), 1).firsts.size(), 2u);
  EXPECT_EQ(PackBestFit(Pieces({5, 5, 5}), 5).firsts.size(), 4u);
  EXPECT_EQ(PackBestFit(Pieces({1, 1, 1, 1, 1}), 5).firsts.size(), 2u);
  EXPECT_DEATH(PackBestFit(Pieces({6}), 5), "6 vs 5");
}

// Against a search over all bins; and every piece is there once.
TEST(PackBestFit, IsBestFitDecreasing) {
  uint64_t state = 1;
  for (int round = 0; round < 50; ++round) {
    const int64_t capacity = 1 + static_cast<int64_t>(MixBits(++state) % 40);
    std::vector<int64_t> lengths(MixBits(++state) % 200);
    for (int64_t& length : lengths) {
      length = 1 + static_cast<int64_t>(MixBits(++state) %
                                        static_cast<uint64_t>(capacity));
    }
    const PackedPieces packed = PackBestFit(Pieces(lengths), capacity);
    std::vector<int64_t> begins, expected_begins;
    for (const TextPiece& piece : packed.pieces)
      begins.push_back(piece.begin());
    for (const TextPiece& piece : Pieces(lengths)) {
      expected_begins.push_back(piece.begin());
    }
    EXPECT_THAT(begins, ::testing::UnorderedElementsAreArray(expected_begins));
    std::sort(lengths.rbegin(), lengths.rend());
    std::vector<int64_t> rooms;
    for (const int64_t length : lengths) {
      int64_t* best = nullptr;
      for (int64_t& room : rooms) {
        if (room >= length && (best == nullptr || room < *best)) best = &room;
      }
      if (best == nullptr) {
        rooms.push_back(capacity);
        best = &rooms.back();
      }
      *best -= length;
    }
    std::vector<int64_t> packed_rooms;
    for (size_t bin = 0; bin + 1 < packed.firsts.size(); ++bin) {
      const std::vector<int64_t> of_bin = Lengths(packed, bin);
      ASSERT_FALSE(of_bin.empty());
      packed_rooms.push_back(
          capacity - std::accumulate(of_bin.begin(), of_bin.end(), int64_t{}));
    }
    // Among bins of one room either may be taken, so the rooms are compared.
    EXPECT_THAT(packed_rooms, ::testing::UnorderedElementsAreArray(rooms));
  }
}

constexpr uint16_t E = 99;

class Packed : public ::testing::Test {
 protected:
  // Documents of these tokens and their place of E.
  void Use(const std::vector<uint16_t>& tokens, EndTokenPlace place) {
    absl::StatusOr<TokenCorpus> corpus = TokenCorpus::OpenFiles(
        {WriteTestFile("f", BytesOf(tokens))}, {TokenType::kUint16, 100});
    TESSERA_ASSERT_OK(corpus);
    corpus_ = std::make_unique<TokenCorpus>(*std::move(corpus));
    absl::StatusOr<DocumentIndex> index =
        DocumentIndex::Build(*corpus_, E, place);
    TESSERA_ASSERT_OK(index);
    index_ = std::make_unique<DocumentIndex>(*std::move(index));
  }

  absl::StatusOr<PackedCorpus> Pack(const PackingOptions& options) {
    return PackedCorpus::Create(corpus_.get(), index_.get(), options);
  }

  std::unique_ptr<TokenCorpus> corpus_;
  std::unique_ptr<DocumentIndex> index_;
};

TEST_F(Packed, StreamCutsAnywhere) {
  Use({1, 2, E, 3, 4, 5, E, 6, E, 7}, EndTokenPlace::kAtEnd);
  TESSERA_ASSERT_OK_AND_ASSIGN(const PackedCorpus packed,
                               Pack({4, Packing::kStream, 0, true}));
  ASSERT_EQ(packed.num_sequences(), 2);
  EXPECT_EQ(packed.num_padding(), 0);
  PackedSequence sequence;
  TESSERA_ASSERT_OK(packed.Read(0, &sequence));
  EXPECT_THAT(sequence.inputs, ElementsAre(1, 2, E, 3));
  EXPECT_THAT(sequence.targets, ElementsAre(2, E, kNone, 4));
  EXPECT_THAT(sequence.positions, ElementsAre(0, 1, 2, 0));
  EXPECT_THAT(sequence.segments, ElementsAre(0, 0, 0, 1));
  EXPECT_THAT(sequence.cu_seqlens, ElementsAre(0, 3, 4));
  TESSERA_ASSERT_OK(packed.Read(1, &sequence));
  EXPECT_THAT(sequence.inputs, ElementsAre(4, 5, E, 6));
  EXPECT_THAT(sequence.targets, ElementsAre(5, E, kNone, E));
  EXPECT_THAT(sequence.positions, ElementsAre(0, 1, 2, 0));
  EXPECT_THAT(sequence.cu_seqlens, ElementsAre(0, 3, 4));
}

TEST_F(Packed, StreamMayPredictAcross) {
  Use({1, 2, E, 3, 4, 5, E, 6, E, 7}, EndTokenPlace::kAtEnd);
  TESSERA_ASSERT_OK_AND_ASSIGN(const PackedCorpus packed,
                               Pack({4, Packing::kStream, 0, false}));
  PackedSequence sequence;
  TESSERA_ASSERT_OK(packed.Read(0, &sequence));
  EXPECT_THAT(sequence.targets, ElementsAre(2, E, 3, 4));
}

// The end-of-text token of the next document says that this one is over.
TEST_F(Packed, StreamOfDocumentsThatBeginWithTheirToken) {
  Use({E, 1, 2, E, 3, 4, E, 5, 6}, EndTokenPlace::kAtBegin);
  TESSERA_ASSERT_OK_AND_ASSIGN(const PackedCorpus packed,
                               Pack({4, Packing::kStream, 0, true}));
  PackedSequence sequence;
  TESSERA_ASSERT_OK(packed.Read(0, &sequence));
  EXPECT_THAT(sequence.inputs, ElementsAre(E, 1, 2, E));
  EXPECT_THAT(sequence.targets, ElementsAre(1, 2, E, 3));
  EXPECT_THAT(sequence.cu_seqlens, ElementsAre(0, 3, 4));
}

// A border at the end of a sequence opens no empty segment.
TEST_F(Packed, StreamWithABorderAtTheEnd) {
  Use({1, 2, 3, E, 4, 5, 6, E, 7}, EndTokenPlace::kAtEnd);
  TESSERA_ASSERT_OK_AND_ASSIGN(const PackedCorpus packed,
                               Pack({4, Packing::kStream, 0, true}));
  PackedSequence sequence;
  for (int64_t i = 0; i < 2; ++i) {
    TESSERA_ASSERT_OK(packed.Read(i, &sequence));
    EXPECT_THAT(sequence.cu_seqlens, ElementsAre(0, 4));
    EXPECT_EQ(sequence.targets[3], kNone);
  }
}

TEST_F(Packed, WholeDocumentsWithPadding) {
  // The pieces have 6 positions (cut to 4 and 2), 1, 3, and none.
  Use({1, 2, 3, 4, 5, 6, E, 7, E, 8, 9, 10, E, E}, EndTokenPlace::kAtEnd);
  TESSERA_ASSERT_OK_AND_ASSIGN(const PackedCorpus packed,
                               Pack({4, Packing::kWhole, 55, true}));
  ASSERT_EQ(packed.num_sequences(), 3);
  EXPECT_EQ(packed.num_padding(), 2);
  PackedSequence sequence;
  TESSERA_ASSERT_OK(packed.Read(0, &sequence));
  EXPECT_THAT(sequence.inputs, ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(sequence.targets, ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(sequence.cu_seqlens, ElementsAre(0, 4));
  EXPECT_EQ(sequence.num_padding, 0);
  TESSERA_ASSERT_OK(packed.Read(1, &sequence));
  EXPECT_THAT(sequence.inputs, ElementsAre(8, 9, 10, 7));
  EXPECT_THAT(sequence.targets, ElementsAre(9, 10, E, E));
  EXPECT_THAT(sequence.positions, ElementsAre(0, 1, 2, 0));
  EXPECT_THAT(sequence.segments, ElementsAre(0, 0, 0, 1));
  EXPECT_THAT(sequence.cu_seqlens, ElementsAre(0, 3, 4));
  TESSERA_ASSERT_OK(packed.Read(2, &sequence));
  EXPECT_THAT(sequence.inputs, ElementsAre(5, 6, 55, 55));
  EXPECT_THAT(sequence.targets, ElementsAre(6, E, kNone, kNone));
  EXPECT_THAT(sequence.positions, ElementsAre(0, 1, 0, 1));
  EXPECT_THAT(sequence.segments, ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(sequence.cu_seqlens, ElementsAre(0, 2, 4));
  EXPECT_EQ(sequence.num_padding, 2);
  // Reading another leaves nothing of this one.
  TESSERA_ASSERT_OK(packed.Read(0, &sequence));
  EXPECT_EQ(sequence.num_padding, 0);
  EXPECT_THAT(sequence.cu_seqlens, ElementsAre(0, 4));
}

TEST_F(Packed, WholeDocumentsThatBeginWithTheirToken) {
  Use({E, 1, 2, E, 3}, EndTokenPlace::kAtBegin);
  TESSERA_ASSERT_OK_AND_ASSIGN(const PackedCorpus packed,
                               Pack({4, Packing::kWhole, 0, true}));
  ASSERT_EQ(packed.num_sequences(), 1);
  PackedSequence sequence;
  TESSERA_ASSERT_OK(packed.Read(0, &sequence));
  EXPECT_THAT(sequence.inputs, ElementsAre(E, 1, 2, E));
  EXPECT_THAT(sequence.targets, ElementsAre(1, 2, E, 3));
}

// In any documents, every token except the first is a target once.
TEST_F(Packed, WholeLosesNothing) {
  std::vector<uint16_t> tokens;
  std::vector<int> expected(100);
  for (uint64_t document = 0; document < 300; ++document) {
    const uint64_t length = MixBits(document) % 30;
    for (uint64_t i = 0; i < length; ++i) {
      tokens.push_back(static_cast<uint16_t>(MixBits(document * 100 + i) % 98));
      if (i > 0) ++expected[tokens.back()];
    }
    tokens.push_back(E);
    if (length > 0) ++expected[E];
  }
  Use(tokens, EndTokenPlace::kAtEnd);
  for (const int64_t seq_len : {1, 2, 7, 16, 64}) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const PackedCorpus packed,
                                 Pack({seq_len, Packing::kWhole, 0, true}));
    std::vector<int> targets(100);
    int64_t padding = 0;
    PackedSequence sequence;
    for (int64_t i = 0; i < packed.num_sequences(); ++i) {
      TESSERA_ASSERT_OK(packed.Read(i, &sequence));
      padding += sequence.num_padding;
      EXPECT_EQ(sequence.cu_seqlens.back(), seq_len);
      for (const int64_t target : sequence.targets) {
        if (target != kNone) ++targets[static_cast<size_t>(target)];
      }
    }
    EXPECT_EQ(targets, expected);
    EXPECT_EQ(padding, packed.num_padding());
    EXPECT_LT(padding, packed.num_sequences() * seq_len / 10 + seq_len);
  }
}

TEST_F(Packed, BatchesForOneCallOfAttention) {
  Use({1, 2, E, 3, 4, 5, E, 6, E, 7}, EndTokenPlace::kAtEnd);
  TESSERA_ASSERT_OK_AND_ASSIGN(const PackedCorpus packed,
                               Pack({4, Packing::kStream, 0, true}));
  std::vector<PackedSequence> batch(2);
  for (int64_t i = 0; i < 2; ++i) {
    TESSERA_ASSERT_OK(packed.Read(i, &batch[static_cast<size_t>(i)]));
  }
  EXPECT_THAT(BatchCuSeqlens(batch), ElementsAre(0, 3, 4, 7, 8));
  EXPECT_THAT(BatchCuSeqlens({}), ElementsAre(0));
}

TEST_F(Packed, WhatCannotBeIsRefused) {
  Use({1, E, 3}, EndTokenPlace::kAtEnd);
  for (const int64_t seq_len : {int64_t{0}, (int64_t{1} << 20) + 1}) {
    EXPECT_THAT(Pack({seq_len, Packing::kStream, 0, true}),
                StatusIs(StatusCode::kInvalidArgument,
                         HasSubstr("expected a seq_len of 1 to 1048576")));
  }
  EXPECT_THAT(Pack({3, Packing::kStream, 0, true}),
              StatusIs(StatusCode::kInvalidArgument,
                       "packing: 3 tokens in 2 documents do not make one "
                       "sequence of 3"));
  TESSERA_ASSERT_OK_AND_ASSIGN(const DocumentIndex other,
                               DocumentIndex::FromEnds({4}, 4));
  EXPECT_THAT(PackedCorpus::Create(corpus_.get(), &other, {2}),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("is of 4 tokens, the corpus has 3")));
}

TEST_F(Packed, TokensOutsideTheVocabularyAreTold) {
  Use({1, E, 3, 100}, EndTokenPlace::kAtEnd);
  TESSERA_ASSERT_OK_AND_ASSIGN(const PackedCorpus packed,
                               Pack({1, Packing::kStream, 0, true}));
  PackedSequence sequence;
  TESSERA_EXPECT_OK(packed.Read(0, &sequence));
  EXPECT_THAT(packed.Read(2, &sequence),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("token 3 (byte 6) is 100")));
}

}  // namespace
}  // namespace tessera
