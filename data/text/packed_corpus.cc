#include "data/text/packed_corpus.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"

namespace tessera {
namespace {

void Resize(int64_t seq_len, PackedSequence* out) {
  const auto length = static_cast<size_t>(seq_len);
  out->inputs.resize(length);
  out->targets.resize(length);
  out->positions.resize(length);
  out->segments.resize(length);
  out->cu_seqlens.assign(1, 0);
  out->num_padding = 0;
}

// Makes the next `length` positions one segment.
void CloseSegment(int64_t length, PackedSequence* out) {
  const auto begin = static_cast<size_t>(out->cu_seqlens.back());
  const auto end = begin + static_cast<size_t>(length);
  std::iota(out->positions.begin() + begin, out->positions.begin() + end, 0);
  std::fill(out->segments.begin() + begin, out->segments.begin() + end,
            static_cast<int32_t>(out->cu_seqlens.size()) - 1);
  out->cu_seqlens.push_back(static_cast<int32_t>(end));
}

}  // namespace

absl::StatusOr<PackedCorpus> PackedCorpus::Create(
    const TokenCorpus* corpus, const DocumentIndex* documents,
    const PackingOptions& options) {
  if (options.seq_len < 1 || options.seq_len > TextPiece::kMaxLength) {
    return absl::InvalidArgumentError(
        absl::StrCat("packing: expected a seq_len of 1 to ",
                     TextPiece::kMaxLength, ", got ", options.seq_len));
  }
  if (documents->num_tokens() != corpus->num_tokens()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "packing: the index of documents is of ", documents->num_tokens(),
        " tokens, the corpus has ", corpus->num_tokens()));
  }
  PackedCorpus packed(corpus, documents, options);
  if (options.packing == Packing::kStream) {
    packed.num_sequences_ = corpus->num_samples(options.seq_len);
  } else {
    TESSERA_RETURN_IF_ERROR(packed.PackWhole());
  }
  if (packed.num_sequences_ == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "packing: ", corpus->num_tokens(), " tokens in ",
        documents->num_documents(), " documents do not make one sequence of ",
        options.seq_len));
  }
  return packed;
}

// A piece's positions are those of its tokens that have a target, so a document
// of n tokens has n - 1.
absl::Status PackedCorpus::PackWhole() {
  if (corpus_->num_tokens() > TextPiece::kMaxBegin) {
    return absl::InvalidArgumentError(
        absl::StrCat("packing: expected at most ", TextPiece::kMaxBegin,
                     " tokens, got ", corpus_->num_tokens()));
  }
  const bool next_ends = documents_->end_token().has_value() &&
                         documents_->place() == EndTokenPlace::kAtBegin;
  std::vector<TextPiece> pieces;
  pieces.reserve(static_cast<size_t>(documents_->num_documents()));
  int64_t num_positions = 0;
  for (int64_t i = 0; i < documents_->num_documents(); ++i) {
    const bool last = i + 1 == documents_->num_documents();
    const int64_t end = documents_->end(i) - (next_ends && !last ? 0 : 1);
    for (int64_t begin = documents_->begin(i); begin < end;) {
      const int64_t length = std::min(options_.seq_len, end - begin);
      pieces.emplace_back(begin, length);
      num_positions += length;
      begin += length;
    }
  }
  packed_ = PackBestFit(std::move(pieces), options_.seq_len);
  num_sequences_ = static_cast<int64_t>(packed_.firsts.size()) - 1;
  num_padding_ = num_sequences_ * options_.seq_len - num_positions;
  return absl::OkStatus();
}

absl::Status PackedCorpus::Read(int64_t index, PackedSequence* out) const {
  TESSERA_CHECK_GE(index, 0);
  TESSERA_CHECK_LT(index, num_sequences_);
  Resize(options_.seq_len, out);
  return options_.packing == Packing::kStream ? ReadStream(index, out)
                                              : ReadWhole(index, out);
}

absl::Status PackedCorpus::ReadStream(int64_t index,
                                      PackedSequence* out) const {
  const int64_t begin = index * options_.seq_len;
  const int64_t end = begin + options_.seq_len;
  TESSERA_RETURN_IF_ERROR(
      corpus_->CopyTokens(begin, absl::MakeSpan(out->inputs)));
  TESSERA_RETURN_IF_ERROR(
      corpus_->CopyTokens(begin + 1, absl::MakeSpan(out->targets)));
  const bool next_ends = documents_->end_token().has_value() &&
                         documents_->place() == EndTokenPlace::kAtBegin;
  int64_t document = documents_->DocumentOf(begin);
  for (int64_t at = begin; at < end; ++document) {
    const int64_t document_end = documents_->end(document);
    const int64_t stop = std::min(end, document_end);
    CloseSegment(stop - at, out);
    at = stop;
    if (at == document_end && options_.mask_across_documents && !next_ends) {
      out->targets[static_cast<size_t>(at - begin) - 1] = kIgnoreIndex;
    }
  }
  return absl::OkStatus();
}

absl::Status PackedCorpus::ReadWhole(int64_t index, PackedSequence* out) const {
  const auto bin = static_cast<size_t>(index);
  size_t at = 0;
  for (uint32_t i = packed_.firsts[bin]; i < packed_.firsts[bin + 1]; ++i) {
    const TextPiece& piece = packed_.pieces[i];
    const auto length = static_cast<size_t>(piece.length());
    TESSERA_RETURN_IF_ERROR(corpus_->CopyTokens(
        piece.begin(), absl::MakeSpan(out->inputs).subspan(at, length)));
    TESSERA_RETURN_IF_ERROR(corpus_->CopyTokens(
        piece.begin() + 1, absl::MakeSpan(out->targets).subspan(at, length)));
    CloseSegment(piece.length(), out);
    at += length;
  }
  out->num_padding = options_.seq_len - static_cast<int64_t>(at);
  if (out->num_padding == 0) return absl::OkStatus();
  std::fill(out->inputs.begin() + at, out->inputs.end(),
            options_.padding_token);
  std::fill(out->targets.begin() + at, out->targets.end(), kIgnoreIndex);
  CloseSegment(out->num_padding, out);
  return absl::OkStatus();
}

std::vector<int32_t> BatchCuSeqlens(absl::Span<const PackedSequence> batch) {
  std::vector<int32_t> borders = {0};
  for (const PackedSequence& sequence : batch) {
    const int32_t first = borders.back();
    for (size_t i = 1; i < sequence.cu_seqlens.size(); ++i) {
      borders.push_back(first + sequence.cu_seqlens[i]);
    }
  }
  return borders;
}

}  // namespace tessera
