#include "data/text/token_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/file.h"
#include "base/status.h"

namespace tessera {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;

std::string PartOf(const std::string& path) { return path + ".part"; }

}  // namespace

absl::StatusOr<std::unique_ptr<TokenFileWriter>> TokenFileWriter::Create(
    const std::string& path, const TokenFileWriterOptions& options) {
  if (options.header) {
    TESSERA_RETURN_IF_ERROR(
        Annotate(TokenHeader(options.type, 0).status(), path));
  }
  const int fd = open(PartOf(path).c_str(),
                      O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return FileError(errno, PartOf(path));
  return absl::WrapUnique(new TokenFileWriter(path, options, fd));
}

TokenFileWriter::TokenFileWriter(std::string path,
                                 const TokenFileWriterOptions& options, int fd)
    : path_(std::move(path)),
      options_(options),
      fd_(fd),
      written_bytes_(options.header ? kTokenHeaderBytes : 0) {}

TokenFileWriter::~TokenFileWriter() {
  close(fd_);
  if (!finished_) unlink(PartOf(path_).c_str());
}

absl::Status TokenFileWriter::Append(absl::Span<const int32_t> tokens) {
  if (options_.header) {  // now, instead of after hours of work
    TESSERA_RETURN_IF_ERROR(Annotate(
        CheckHeaderCount(num_tokens_ + static_cast<int64_t>(tokens.size())),
        path_));
  }
  const int64_t largest = MaxToken(options_.type);
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= 0 && tokens[i] <= largest) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        path_, ": token ", num_tokens_ + static_cast<int64_t>(i), " would be ",
        tokens[i], ", which does not fit ", TokenTypeName(options_.type)));
  }
  // On little-endian machines the low bytes of a token come first.
  const auto bytes = static_cast<size_t>(TokenBytes(options_.type));
  for (const int32_t token : tokens) {
    char word[4];
    std::memcpy(word, &token, sizeof(word));
    buffer_.insert(buffer_.end(), word, word + bytes);
    if (buffer_.size() >= kBufferBytes) TESSERA_RETURN_IF_ERROR(Flush());
  }
  num_tokens_ += static_cast<int64_t>(tokens.size());
  return absl::OkStatus();
}

absl::Status TokenFileWriter::Flush() {
  const auto bytes = static_cast<int64_t>(buffer_.size());
  TESSERA_RETURN_IF_ERROR(
      WriteAt(fd_, PartOf(path_), written_bytes_, buffer_.data(), bytes));
  written_bytes_ += bytes;
  buffer_.clear();
  return absl::OkStatus();
}

absl::Status TokenFileWriter::Finish() {
  TESSERA_CHECK(!finished_);
  if (num_tokens_ == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": no tokens to write"));
  }
  TESSERA_RETURN_IF_ERROR(Flush());
  if (options_.header) {
    absl::StatusOr<std::string> header =
        TokenHeader(options_.type, num_tokens_);
    TESSERA_RETURN_IF_ERROR(Annotate(header.status(), path_));
    TESSERA_RETURN_IF_ERROR(WriteAt(fd_, PartOf(path_), 0, header->data(),
                                    static_cast<int64_t>(header->size())));
  }
  if (fsync(fd_) != 0) return FileError(errno, PartOf(path_));
  if (rename(PartOf(path_).c_str(), path_.c_str()) != 0) {
    return FileError(errno, path_);
  }
  finished_ = true;
  return SyncFolderOf(path_);
}

}  // namespace tessera
