#include "data/images/gzip_file.h"

#include <zlib.h>

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "data/mapped_file.h"

namespace tessera {
namespace {

// Bytes that zlib gets, and by which the result grows, at a time.
constexpr size_t kPiece = size_t{1} << 16;
constexpr int kGzipOnly = 15 + 16;  // inflateInit2's window bits

}  // namespace

absl::StatusOr<std::vector<uint8_t>> ReadGzipFile(const std::string& path,
                                                  int64_t max_bytes) {
  TESSERA_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  z_stream stream = {};
  if (inflateInit2(&stream, kGzipOnly) != Z_OK) {
    return absl::ResourceExhaustedError(
        absl::StrCat(path, ": zlib could not begin"));
  }
  const auto ender = absl::MakeCleanup([&stream] { inflateEnd(&stream); });
  absl::Span<const uint8_t> rest = file.bytes();
  std::vector<uint8_t> result;
  int outcome = Z_OK;
  while (outcome == Z_OK) {
    if (stream.avail_in == 0) {  // zlib counts in 32 bits
      const size_t count = std::min(rest.size(), kPiece);
      stream.next_in = const_cast<uint8_t*>(rest.data());
      stream.avail_in = static_cast<uInt>(count);
      rest.remove_prefix(count);
    }
    const size_t before = result.size();
    result.resize(before + kPiece);
    stream.next_out = result.data() + before;
    stream.avail_out = static_cast<uInt>(kPiece);
    outcome = inflate(&stream, Z_NO_FLUSH);
    result.resize(before + kPiece - stream.avail_out);
    // Concatenated files are one file (RFC 1952, 2.2).
    if (outcome == Z_STREAM_END && !(rest.empty() && stream.avail_in == 0)) {
      outcome = inflateReset(&stream);
    }
    if (static_cast<int64_t>(result.size()) > max_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": holds more than ", max_bytes, " bytes when unpacked"));
    }
  }
  if (outcome == Z_STREAM_END) return result;
  const size_t at = file.bytes().size() - rest.size() - stream.avail_in;
  const char* const words = outcome == Z_BUF_ERROR  ? "the file is truncated"
                            : stream.msg != nullptr ? stream.msg
                                                    : "zlib cannot read it";
  return absl::DataLossError(absl::StrCat(path, ": byte ", at, ": ", words));
}

}  // namespace tessera
