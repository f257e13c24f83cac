// TokenCorpus: the tokens of one or more files, one behind the other, as
// training text.
//
//   files    [ t0 t1 t2 t3 t4 t5 | t6 t7 t8 ]      seq_len = 4
//   sample 0 [ t0 t1 t2 t3 | t4 ]                  the last token of a sample
//   sample 1             [ t4 t5   t6 t7 | t8 ]    is the first of the next
//
// A sample is seq_len + 1 tokens: inputs are its first seq_len, targets its
// last seq_len. They are read as int64, or as int32, which are half the bytes
// where they go to a device (torch's embeddings take both, its losses int64).
// Samples go over the borders of files, so what the files are cut into changes
// nothing. Files may have different formats.
//
//   TESSERA_ASSIGN_OR_RETURN(
//       const TokenCorpus corpus,
//       TokenCorpus::Open("fineweb/train_*.bin", {.vocab_size = 50257}));
//
// Documents within it: data/text/packed_corpus.h. Threads: const methods may
// run concurrently.
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
  // The files of a pattern (data/file_names.h: braces, then *, ? and [,
  // sorted), or these, in this order. Errors are MatchFiles' and TokenFile's,
  // behind "token corpus: "; InvalidArgument for no file. LOCAL: ranks see the
  // same corpus if they see the same files.
  static absl::StatusOr<TokenCorpus> Open(absl::string_view pattern,
                                          const TokenFileOptions& options = {});
  static absl::StatusOr<TokenCorpus> OpenFiles(
      absl::Span<const std::string> paths,
      const TokenFileOptions& options = {});

  int64_t num_tokens() const { return ends_.back(); }
  const std::vector<TokenFile>& files() const { return files_; }

  // Whole samples; what is left at the end is not used. REQUIRES: seq_len > 0.
  int64_t num_samples(int64_t seq_len) const;

  // Writes the seq_len + 1 tokens of sample `index`. T: int64_t or int32_t.
  // InvalidArgument naming file and position of the first token that is not in
  // the vocabulary, or does not fit in an int32_t.
  // REQUIRES: 0 <= index < num_samples(seq_len), out.size() == seq_len + 1.
  template <typename T>
  absl::Status CopySample(int64_t index, int64_t seq_len,
                          absl::Span<T> out) const;
  // The same of many samples, one behind the other, as a batch has them: while
  // one is written the memory of the next ones is asked for, which makes it
  // faster than one call for each in a random order, up to three times.
  // REQUIRES: out.size() == indices.size() * (seq_len + 1).
  template <typename T>
  absl::Status CopySamples(absl::Span<const int64_t> indices, int64_t seq_len,
                           absl::Span<T> out) const;
  // Writes tokens [begin, begin + out.size()), counted over all files.
  // REQUIRES: 0 <= begin, begin + out.size() <= num_tokens().
  template <typename T>
  absl::Status CopyTokens(int64_t begin, absl::Span<T> out) const {
    return CopyTokens(begin, out, nullptr);
  }

  // "path: token 17" of a token counted over all files, for messages.
  std::string Describe(int64_t token) const;

 private:
  explicit TokenCorpus(std::vector<TokenFile> files);
  size_t FileOf(int64_t token) const;
  // Where it lies in memory.
  const uint8_t* AddressOf(int64_t token) const;
  template <typename T>
  absl::Status CopyTokens(int64_t begin, absl::Span<T> out,
                          const void* next) const;

  std::vector<TokenFile> files_;  // at least one
  std::vector<int64_t> ends_;     // tokens of files_[0, i]
};

}  // namespace tessera
#endif  // DATA_TEXT_TOKEN_CORPUS_H_
