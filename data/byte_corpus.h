// ByteCorpus: the bytes of one file, mapped read-only, as training text with
// one token per byte.
//
//   bytes    [ b0 b1 b2 b3 b4 b5 b6 b7 b8 ]       seq_len = 4
//   sample 0 [ b0 b1 b2 b3 | b4 ]                 the last byte of a sample
//   sample 1             [ b4 b5 b6 b7 | b8 ]     is the first of the next
//
// A sample is seq_len + 1 bytes: inputs are its first seq_len, targets its last
// seq_len.
//
// For pages, truncated files and threads see data/mapped_file.h; for files of
// tokens data/text/token_corpus.h.
#ifndef DATA_BYTE_CORPUS_H_
#define DATA_BYTE_CORPUS_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "data/mapped_file.h"

namespace tessera {

class ByteCorpus {
 public:
  // Maps the file; errors are MappedFile's. LOCAL.
  static absl::StatusOr<ByteCorpus> Open(const std::string& path,
                                         int64_t min_bytes = 1);

  // All bytes; valid as long as this.
  absl::Span<const uint8_t> bytes() const { return file_.bytes(); }
  const std::string& path() const { return file_.path(); }

  // Whole samples in the file; what is left at the end is not used.
  // REQUIRES: seq_len > 0.
  int64_t num_samples(int64_t seq_len) const;

  // The seq_len + 1 bytes of sample `index`; valid as long as this.
  // REQUIRES: 0 <= index < num_samples(seq_len).
  absl::Span<const uint8_t> sample(int64_t index, int64_t seq_len) const;

 private:
  explicit ByteCorpus(MappedFile file) : file_(std::move(file)) {}

  MappedFile file_;
};

}  // namespace tessera
#endif  // DATA_BYTE_CORPUS_H_
