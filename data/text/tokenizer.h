// Tokenizer converts text to the numbers that a model reads, and back.
// ByteTokenizer is one; SentencePiece models (data/sentencepiece) are others.
#ifndef DATA_TEXT_TOKENIZER_H_
#define DATA_TEXT_TOKENIZER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace tessera {

// Threads: const methods may run concurrently.
class Tokenizer {
 public:
  // bos_id, eos_id and unk_id return this if there is no such token.
  static constexpr int32_t kNone = -1;

  virtual ~Tokenizer() = default;

  // Ids are 0 .. vocab_size() - 1.
  virtual int32_t vocab_size() const = 0;
  virtual int32_t bos_id() const { return kNone; }  // beginning of text
  virtual int32_t eos_id() const { return kNone; }  // end of text
  virtual int32_t unk_id() const { return kNone; }  // text that has no token

  // Appends the ids of `text` to `ids`, without bos and eos.
  virtual absl::Status Encode(absl::string_view text,
                              std::vector<int32_t>* ids) const = 0;
  // Decodes ids. InvalidArgument names the first id that does not exist, and
  // its place. bos and eos give no text.
  virtual absl::StatusOr<std::string> Decode(
      absl::Span<const int32_t> ids) const = 0;
};

// ByteTokenizer has one token per byte, as a file of kUint8 tokens. With
// `with_eos` a 257th token is the end of text, which no text contains.
class ByteTokenizer : public Tokenizer {
 public:
  explicit ByteTokenizer(bool with_eos = false) : with_eos_(with_eos) {}

  int32_t vocab_size() const override { return with_eos_ ? 257 : 256; }
  int32_t eos_id() const override { return with_eos_ ? 256 : kNone; }
  absl::Status Encode(absl::string_view text,
                      std::vector<int32_t>* ids) const override;
  absl::StatusOr<std::string> Decode(
      absl::Span<const int32_t> ids) const override;

 private:
  bool with_eos_;
};

}  // namespace tessera
#endif  // DATA_TEXT_TOKENIZER_H_
