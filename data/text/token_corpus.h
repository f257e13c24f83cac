// TokenCorpus is the tokens of one or more files, one after the other, as
// training text.
//
//   files    [ t0 t1 t2 t3 t4 t5 | t6 t7 t8 ]      seq_len = 4
//   sample 0 [ t0 t1 t2 t3 | t4 ]                  the last token of a sample
//   sample 1             [ t4 t5   t6 t7 | t8 ]    is the first of the next
//
// A sample is seq_len + 1 tokens: inputs are its first seq_len, targets its
// last seq_len. They are read as int64, or as int32, which halves the bytes
// that go to a device (torch's embeddings take both, its losses int64). Samples
// continue across the borders of files, so the way the text is cut into files
// does not matter. Files may have different formats.
//
//   TESSERA_ASSIGN_OR_RETURN(
//       const TokenCorpus corpus,
//       TokenCorpus::Open("fineweb/train_*.bin", {.vocab_size = 50257}));
//
// data/text/packed_corpus.h handles documents within the text. Threads: const
// methods may run concurrently.
#ifndef DATA_TEXT_TOKEN_CORPUS_H_
#define DATA_TEXT_TOKEN_CORPUS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "data/text/token_file.h"

namespace tessera {

class TokenCorpus {
 public:
  // Open the files of a pattern (data/file_names.h: braces, then *, ? and [,
  // sorted), or the given ones, in this order. Errors are those of MatchFiles
  // and TokenFile after "token corpus: ", and InvalidArgument for no file.
  // LOCAL: ranks see the same corpus if they see the same files.
  static absl::StatusOr<TokenCorpus> Open(absl::string_view pattern,
                                          const TokenFileOptions& options = {});
  static absl::StatusOr<TokenCorpus> OpenFiles(
      absl::Span<const std::string> paths,
      const TokenFileOptions& options = {});

  int64_t num_tokens() const { return ends_.back(); }
  const std::vector<TokenFile>& files() const { return files_; }

  // Returns the number of whole samples; the rest is not used. REQUIRES:
  // seq_len > 0.
  int64_t num_samples(int64_t seq_len) const;

  // Writes the seq_len + 1 tokens of sample `index`. T is int64_t or int32_t.
  // Returns InvalidArgument naming file and position of the first token that is
  // not in the vocabulary, or does not fit in an int32_t. REQUIRES: 0 <= index
  // < num_samples(seq_len), out.size() == seq_len + 1.
  template <typename T>
  absl::Status CopySample(int64_t index, int64_t seq_len,
                          absl::Span<T> out) const;
  // Writes many samples, one after the other, as a batch has them. While it
  // writes one it prefetches the next ones, which makes it up to three times
  // faster than one call for each in a random order. REQUIRES: out.size() ==
  // indices.size() * (seq_len + 1).
  template <typename T>
  absl::Status CopySamples(absl::Span<const int64_t> indices, int64_t seq_len,
                           absl::Span<T> out) const;
  // Writes tokens [begin, begin + out.size()), counted over all files.
  // REQUIRES: 0 <= begin, begin + out.size() <= num_tokens().
  template <typename T>
  absl::Status CopyTokens(int64_t begin, absl::Span<T> out) const {
    return CopyTokens(begin, out, nullptr);
  }

  // Returns "path: token 17" for a token counted over all files, for messages.
  std::string Describe(int64_t token) const;

 private:
  explicit TokenCorpus(std::vector<TokenFile> files);
  size_t FileOf(int64_t token) const;
  // Returns the token's address in memory.
  const uint8_t* AddressOf(int64_t token) const;
  template <typename T>
  absl::Status CopyTokens(int64_t begin, absl::Span<T> out,
                          const void* next) const;

  std::vector<TokenFile> files_;  // at least one
  std::vector<int64_t> ends_;     // tokens of files_[0, i]
};

}  // namespace tessera
#endif  // DATA_TEXT_TOKEN_CORPUS_H_
