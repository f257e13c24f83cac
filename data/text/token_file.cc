#include "data/text/token_file.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "data/text/token_widen.h"

namespace tessera {
namespace {

// llm.c's formats, by their magic number.
struct Format {
  int32_t magic;
  int32_t version;
  TokenType type;
};
constexpr Format kFormats[] = {{20240520, 1, TokenType::kUint16},
                               {20240801, 7, TokenType::kUint32}};
// This magic number is that of multiple-choice questions, which are no token
// stream.
constexpr int32_t kEvaluationMagic = 20240522;

constexpr int64_t kEndOfInt32 = int64_t{1} << 31;

int32_t Int32At(absl::Span<const uint8_t> bytes, size_t index) {
  int32_t value;
  std::memcpy(&value, bytes.data() + 4 * index, sizeof(value));
  return value;
}

}  // namespace

int64_t TokenBytes(TokenType type) { return 1 << static_cast<int>(type); }

const char* TokenTypeName(TokenType type) {
  constexpr const char* kNames[] = {"uint8", "uint16", "uint32"};
  return kNames[static_cast<int>(type)];
}

int64_t MaxToken(TokenType type) {
  return (int64_t{1} << (8 * TokenBytes(type))) - 1;
}

absl::StatusOr<TokenFile> TokenFile::Open(const std::string& path,
                                          const TokenFileOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::Open(path));
  TokenFile file(std::move(mapped));
  file.vocab_size_ = options.vocab_size;
  TESSERA_RETURN_IF_ERROR(file.FindFormat(options));
  return file;
}

absl::Status TokenFile::FindFormat(const TokenFileOptions& options) {
  const absl::Span<const uint8_t> bytes = file_.bytes();
  const auto file_bytes = static_cast<int64_t>(bytes.size());
  const int32_t magic = file_bytes >= 4 ? Int32At(bytes, 0) : 0;
  for (const Format& format : kFormats) {
    if (format.magic != magic) continue;
    if (file_bytes < kTokenHeaderBytes) {
      return absl::DataLossError(
          absl::StrCat(path(), ": byte ", file_bytes,
                       ": the file ends in llm.c's header of ",
                       kTokenHeaderBytes, " bytes; is it truncated?"));
    }
    const int32_t version = Int32At(bytes, 1);
    if (version != format.version) {
      return absl::InvalidArgumentError(
          absl::StrCat(path(), ": byte 4: expected version ", format.version,
                       " of llm.c's format ", magic, ", got ", version));
    }
    type_ = format.type;
    num_tokens_ = Int32At(bytes, 2);
    header_bytes_ = static_cast<size_t>(kTokenHeaderBytes);
    const int64_t expected =
        kTokenHeaderBytes + num_tokens_ * TokenBytes(type_);
    if (num_tokens_ < 1 || expected != file_bytes) {
      return absl::DataLossError(absl::StrCat(
          path(), ": byte 8: the header says ", num_tokens_, " tokens of ",
          TokenTypeName(type_), ", which needs a file of ", expected,
          " bytes; it has ", file_bytes,
          file_bytes < expected ? "; is it truncated?" : ""));
    }
    return absl::OkStatus();
  }
  if (magic == kEvaluationMagic && file_bytes >= kTokenHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path(), ": byte 0: this is a file of llm.c's questions (",
                     magic, "), not of tokens to train on"));
  }
  if (!options.headerless.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        path(),
        ": byte 0: expected llm.c's header (20240520 or 20240801), got ", magic,
        "; for a file without one say the type of its tokens "
        "(TokenFileOptions::headerless; --headerless), of text kUint8 "
        "(--type uint8)"));
  }
  type_ = *options.headerless;
  num_tokens_ = file_bytes / TokenBytes(type_);
  if (file_bytes % TokenBytes(type_) != 0) {
    return absl::DataLossError(absl::StrCat(
        path(), ": byte ", num_tokens_ * TokenBytes(type_),
        ": the file ends within a token of ", TokenTypeName(type_), ", it has ",
        file_bytes, " bytes; is it truncated, or of another type?"));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status TokenFile::CopyTokens(int64_t begin, absl::Span<T> out,
                                   const void* next) const {
  const auto count = static_cast<int64_t>(out.size());
  TESSERA_CHECK_GE(begin, 0);
  TESSERA_CHECK_LE(count, num_tokens_ - begin);
  const uint8_t* const from = bytes().data() + begin * TokenBytes(type_);
  uint32_t largest = 0;
  switch (type_) {
    case TokenType::kUint8:
      largest = WidenTokens(from, count, out.data(), next);
      break;
    case TokenType::kUint16:
      largest = WidenTokens(reinterpret_cast<const uint16_t*>(from), count,
                            out.data(), next);
      break;
    case TokenType::kUint32:
      largest = WidenTokens(reinterpret_cast<const uint32_t*>(from), count,
                            out.data(), next);
      break;
  }
  // Tokens have to be below this.
  int64_t end = int64_t{std::numeric_limits<uint32_t>::max()} + 1;
  if (vocab_size_ > 0) end = std::min(end, vocab_size_);
  if (sizeof(T) == 4) end = std::min(end, kEndOfInt32);
  if (count > 0 && largest >= end) return OutsideVocabulary(begin, end, out);
  return absl::OkStatus();
}

template <typename T>
absl::Status TokenFile::OutsideVocabulary(int64_t begin, int64_t end,
                                          absl::Span<T> out) const {
  // It reads what was written to `out`, so that the message shows what was
  // found, even if somebody writes to the file meanwhile.
  const auto token = [&](size_t i) {
    return static_cast<int64_t>(static_cast<uint32_t>(out[i]));
  };
  size_t i = 0;
  while (i + 1 < out.size() && token(i) < end) ++i;
  const int64_t position = begin + static_cast<int64_t>(i);
  const std::string what = absl::StrCat(
      path(), ": token ", position, " (byte ",
      static_cast<int64_t>(header_bytes_) + position * TokenBytes(type_),
      ") is ", token(i));
  if (vocab_size_ == 0 || end < vocab_size_) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ", which no int32 holds; read int64 of it"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat(what, ", the vocabulary has ", vocab_size_,
                   "; is it another tokenizer's file, or another type than ",
                   TokenTypeName(type_), "?"));
}

template absl::Status TokenFile::CopyTokens(int64_t, absl::Span<int32_t>,
                                            const void*) const;
template absl::Status TokenFile::CopyTokens(int64_t, absl::Span<int64_t>,
                                            const void*) const;

absl::Status CheckHeaderCount(int64_t num_tokens) {
  if (num_tokens >= 0 && num_tokens <= std::numeric_limits<int32_t>::max()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("llm.c's header counts tokens in an int32, ", num_tokens,
                   " do not fit; write several files"));
}

absl::StatusOr<std::string> TokenHeader(TokenType type, int64_t num_tokens) {
  TESSERA_RETURN_IF_ERROR(CheckHeaderCount(num_tokens));
  for (const Format& format : kFormats) {
    if (format.type != type) continue;
    const int32_t words[] = {format.magic, format.version,
                             static_cast<int32_t>(num_tokens)};
    std::string header(kTokenHeaderBytes, '\0');
    std::memcpy(header.data(), words, sizeof(words));
    return header;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("llm.c has no format of ", TokenTypeName(type), " tokens"));
}

}  // namespace tessera
