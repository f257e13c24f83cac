// PackedCorpus cuts the documents of a corpus into sequences of one length,
// with the borders that keep the attention of a document to itself.
//
//   documents   a a a a a | b b | c c c c c c c         seq_len = 4
//
//   kStream     [a a a a] [a b b c] [c c c c] ...   one stream, cut anywhere
//   kWhole      [a a a a] [c c c c] [c c b .]       whole where they fit
//
// Each of the seq_len positions of a sequence has an input and a target, the
// following token. kStream is what GPT does: nothing is lost, most documents
// are cut. kWhole cuts documents only where they are longer than a sequence,
// and then only as often as needed; the pieces are packed best fit first, the
// longest first, and unused space is padding: Ding et al., Fewer Truncations
// Improve Language Modeling, ICML 2024. With kWhole the last token of a
// document has no target, and so no position, except where documents begin with
// the end-of-text token: then the next document's one says that it is over.
//
// Segments. The tokens of one document in a sequence are a segment, and so is
// the padding. Attention that stays within segments (block-causal) sees no
// other document, and no row is empty. cu_seqlens are the borders of the
// segments as FlashAttention's varlen functions take them; positions begin at 0
// in each segment.
//
// With kWhole the sequences are ordered by the length of their longest piece,
// so shuffle them (DistributedSampler does).
//
// Threads: const methods may run concurrently.
#ifndef DATA_TEXT_PACKED_CORPUS_H_
#define DATA_TEXT_PACKED_CORPUS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "data/text/best_fit.h"
#include "data/text/document_index.h"
#include "data/text/token_corpus.h"

namespace tessera {

enum class Packing { kStream, kWhole };

struct PackingOptions {
  int64_t seq_len = 0;  // 1 to 2^20
  Packing packing = Packing::kStream;
  int64_t padding_token = 0;  // the input at padding; no loss is taken there
  // With kStream: no target where the next token belongs to the next document
  // and is not its end-of-text token. (kWhole has no such positions.)
  bool mask_across_documents = true;
};

// Losses of torch leave out this target.
inline constexpr int64_t kIgnoreIndex = -100;

// One sequence, seq_len = L. Reading into it again reuses its memory.
struct PackedSequence {
  std::vector<int64_t> inputs;     // [L]
  std::vector<int64_t> targets;    // [L], kIgnoreIndex where there is none
  std::vector<int64_t> positions;  // [L], from 0 in each segment
  std::vector<int32_t> segments;   // [L], 0 0 0 1 1 2 ..., padding the last
  // [segments + 1]: 0, where each but the first begins, L.
  std::vector<int32_t> cu_seqlens;
  int64_t num_padding = 0;  // positions
};

class PackedCorpus {
 public:
  // `corpus` and `documents` outlive this. Takes O(documents) time; kWhole
  // keeps 8 bytes for each piece and 4 for each sequence (and uses 20 for each
  // piece while it packs), kStream keeps nothing. Returns InvalidArgument for a
  // seq_len out of range, an index of another number of tokens, or a corpus
  // without one sequence. LOCAL: the result depends on options and documents
  // alone, so ranks agree.
  static absl::StatusOr<PackedCorpus> Create(const TokenCorpus* corpus,
                                             const DocumentIndex* documents,
                                             const PackingOptions& options);

  int64_t num_sequences() const { return num_sequences_; }
  int64_t seq_len() const { return options_.seq_len; }
  // Returns the number of padding positions in all sequences; 0 with kStream.
  int64_t num_padding() const { return num_padding_; }

  // Reads a sequence. Errors are those of TokenCorpus::CopyTokens. REQUIRES: 0
  // <= index < num_sequences().
  absl::Status Read(int64_t index, PackedSequence* out) const;

 private:
  PackedCorpus(const TokenCorpus* corpus, const DocumentIndex* documents,
               const PackingOptions& options)
      : corpus_(corpus), documents_(documents), options_(options) {}
  absl::Status PackWhole();
  absl::Status ReadStream(int64_t index, PackedSequence* out) const;
  absl::Status ReadWhole(int64_t index, PackedSequence* out) const;

  const TokenCorpus* corpus_;       // not owned
  const DocumentIndex* documents_;  // not owned
  PackingOptions options_;
  int64_t num_sequences_ = 0;
  int64_t num_padding_ = 0;
  PackedPieces packed_;  // for kWhole
};

// Returns the borders of a batch whose sequences lie one after the other, [B *
// L], for one call of FlashAttention. Starts with 0, ends with B * L.
std::vector<int32_t> BatchCuSeqlens(absl::Span<const PackedSequence> batch);

}  // namespace tessera
#endif  // DATA_TEXT_PACKED_CORPUS_H_
