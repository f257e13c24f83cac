// TokenFile is one mapped file of tokens, in one of these formats (all numbers
// are little-endian):
//
//   nanoGPT's .bin          uint16 tokens, no header
//   headerless              uint8, uint16 or uint32 tokens
//   llm.c's .bin, GPT-2     256 int32: 20240520, 1, number of tokens, 0, ...;
//                           then that many uint16 tokens
//   llm.c's .bin, Llama-3   256 int32: 20240801, 7, number of tokens, 0, ...;
//                           then that many uint32 tokens
//
// llm.c's files are recognised by their first number; for a file without a
// header the caller gives the type. Sources: karpathy/nanoGPT
// data/*/prepare.py; karpathy/llm.c dev/data/data_common.py (write_datafile),
// llmc/dataloader.h.
//
// See data/mapped_file.h for pages, truncated files and threads.
#ifndef DATA_TEXT_TOKEN_FILE_H_
#define DATA_TEXT_TOKEN_FILE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "data/mapped_file.h"

namespace tessera {

enum class TokenType { kUint8, kUint16, kUint32 };
int64_t TokenBytes(TokenType type);         // 1, 2 or 4
const char* TokenTypeName(TokenType type);  // "uint16"
// Returns the largest token of that type.
int64_t MaxToken(TokenType type);

struct TokenFileOptions {
  // The type of files without a header; a header gives its own. Absent: a file
  // without a header is refused.
  std::optional<TokenType> headerless;
  // Tokens must be less than this; 0: any. Tokens are checked when they are
  // read.
  int64_t vocab_size = 0;
};

class TokenFile {
 public:
  // Maps the file. Returns NotFound (and so on) with the path and the system's
  // words; InvalidArgument for a folder, an empty file, a file without a header
  // if no type is given, or an unknown version; DataLoss if the size is not the
  // one that the header or the type requires. Each names path and byte. LOCAL.
  static absl::StatusOr<TokenFile> Open(const std::string& path,
                                        const TokenFileOptions& options);

  int64_t num_tokens() const { return num_tokens_; }
  TokenType type() const { return type_; }
  const std::string& path() const { return file_.path(); }
  // Returns the tokens as they are in the file: num_tokens() *
  // TokenBytes(type()).
  absl::Span<const uint8_t> bytes() const {
    return file_.bytes().subspan(header_bytes_);
  }

  // Copies tokens [begin, begin + out.size()) to `out`, of int64_t or int32_t.
  // Returns InvalidArgument naming file and position of the first token that is
  // not in the vocabulary, or does not fit in an int32_t; `out` has been
  // written all the same. `next` is what the caller reads afterwards; it is
  // prefetched meanwhile (data/text/token_widen.h). REQUIRES: 0 <= begin, begin
  // + out.size() <= num_tokens().
  template <typename T>
  absl::Status CopyTokens(int64_t begin, absl::Span<T> out,
                          const void* next = nullptr) const;

 private:
  explicit TokenFile(MappedFile file) : file_(std::move(file)) {}
  absl::Status FindFormat(const TokenFileOptions& options);
  template <typename T>
  absl::Status OutsideVocabulary(int64_t begin, int64_t end,
                                 absl::Span<T> out) const;

  MappedFile file_;
  size_t header_bytes_ = 0;
  TokenType type_ = TokenType::kUint16;
  int64_t num_tokens_ = 0;
  int64_t vocab_size_ = 0;  // 0: not checked
};

// The length of llm.c's header, for code that writes such files.
inline constexpr int64_t kTokenHeaderBytes = 1024;
// Returns InvalidArgument for more than 2^31 - 1 tokens, since the count is an
// int32.
absl::Status CheckHeaderCount(int64_t num_tokens);
// Returns the header; errors are those of CheckHeaderCount, and InvalidArgument
// for uint8.
absl::StatusOr<std::string> TokenHeader(TokenType type, int64_t num_tokens);

}  // namespace tessera
#endif  // DATA_TEXT_TOKEN_FILE_H_
