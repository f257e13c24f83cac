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
// Pages are read when touched and shared between the processes of a host. The
// file must not be truncated while it is mapped: reading on ends the process
// (SIGBUS), which names the file on stderr. Threads: const methods may run
// concurrently.
#ifndef DATA_BYTE_CORPUS_H_
#define DATA_BYTE_CORPUS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace tessera {

class ByteCorpus {
 public:
  // Maps the file. Returns NotFound (and so on) with the path and the system's
  // words; InvalidArgument with path, size and `min_bytes` if the file is
  // shorter than that, and for a folder or a pipe. An empty file is always
  // refused. LOCAL.
  static absl::StatusOr<ByteCorpus> Open(const std::string& path,
                                         int64_t min_bytes = 1);

  ByteCorpus(ByteCorpus&& other) noexcept;
  ByteCorpus& operator=(ByteCorpus&& other) noexcept;
  ~ByteCorpus();

  // All bytes; valid as long as this.
  absl::Span<const uint8_t> bytes() const { return bytes_; }
  const std::string& path() const { return path_; }

  // Whole samples in the file; what is left at the end is not used.
  // REQUIRES: seq_len > 0.
  int64_t num_samples(int64_t seq_len) const;

  // The seq_len + 1 bytes of sample `index`; valid as long as this.
  // REQUIRES: 0 <= index < num_samples(seq_len).
  absl::Span<const uint8_t> sample(int64_t index, int64_t seq_len) const;

 private:
  ByteCorpus(std::string path, absl::Span<const uint8_t> bytes)
      : path_(std::move(path)), bytes_(bytes) {}
  void Unmap();

  std::string path_;
  absl::Span<const uint8_t> bytes_;  // the mapping; empty when moved from
};

}  // namespace tessera
#endif  // DATA_BYTE_CORPUS_H_
