// TokenFileWriter writes a file that TokenFile reads (data/text/token_file.h).
//
// Threads: the caller serializes the calls. LOCAL: one rank writes.
#ifndef DATA_TEXT_TOKEN_WRITER_H_
#define DATA_TEXT_TOKEN_WRITER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "data/text/token_file.h"

namespace tessera {

struct TokenFileWriterOptions {
  TokenType type = TokenType::kUint16;
  // Whether to write llm.c's header, which needs uint16 or uint32 and at most
  // 2^31 - 1 tokens.
  bool header = true;
};

class TokenFileWriter {
 public:
  // Begins PATH.part, which Finish renames to `path`, so a file of that name is
  // whole. Returns InvalidArgument for uint8 with a header, and the system's
  // words with the path if it cannot be written.
  static absl::StatusOr<std::unique_ptr<TokenFileWriter>> Create(
      const std::string& path, const TokenFileWriterOptions& options);

  // Removes PATH.part unless it was finished.
  ~TokenFileWriter();
  TokenFileWriter(const TokenFileWriter&) = delete;
  TokenFileWriter& operator=(const TokenFileWriter&) = delete;

  // Appends tokens. InvalidArgument names the first token that does not fit the
  // type, and its place; then nothing of `tokens` is written.
  absl::Status Append(absl::Span<const int32_t> tokens);

  int64_t num_tokens() const { return num_tokens_; }

  // Writes the header and waits until all is on the disk. Returns
  // InvalidArgument if there are no tokens, or more than a header can hold.
  // Call it once, as the last call.
  absl::Status Finish();

 private:
  TokenFileWriter(std::string path, const TokenFileWriterOptions& options,
                  int fd);
  absl::Status Flush();

  const std::string path_;
  const TokenFileWriterOptions options_;
  int fd_;
  bool finished_ = false;
  int64_t num_tokens_ = 0;
  int64_t written_bytes_ = 0;
  std::vector<char> buffer_;
};

}  // namespace tessera
#endif  // DATA_TEXT_TOKEN_WRITER_H_
