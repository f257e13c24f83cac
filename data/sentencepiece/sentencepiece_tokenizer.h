// SentencePieceTokenizer uses a model that SentencePiece has trained (BPE,
// unigram, word or char), from its .model file: Kudo and Richardson, EMNLP
// 2018; github.com/google/sentencepiece.
//
// Only programs without protobuf can use it: see this room's BUILD.
#ifndef DATA_SENTENCEPIECE_SENTENCEPIECE_TOKENIZER_H_
#define DATA_SENTENCEPIECE_SENTENCEPIECE_TOKENIZER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "data/text/tokenizer.h"

namespace tessera {

class SentencePieceModel;

class SentencePieceTokenizer : public Tokenizer {
 public:
  // Opens a model. Returns NotFound (and so on) with the path and the system's
  // words, and InvalidArgument with the path and SentencePiece's words for a
  // file that is no model.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Open(
      const std::string& path);

  ~SentencePieceTokenizer() override;

  int32_t vocab_size() const override;
  int32_t bos_id() const override;
  int32_t eos_id() const override;
  int32_t unk_id() const override;
  absl::Status Encode(absl::string_view text,
                      std::vector<int32_t>* ids) const override;
  absl::StatusOr<std::string> Decode(
      absl::Span<const int32_t> ids) const override;

 private:
  SentencePieceTokenizer();

  std::unique_ptr<SentencePieceModel> model_;
};

}  // namespace tessera
#endif  // DATA_SENTENCEPIECE_SENTENCEPIECE_TOKENIZER_H_
