// A header is text unless stated otherwise:
//
//   byte 0    name, 100 bytes, shorter ones end with a zero
//        124  size, 12 bytes: octal, or base 256 if the first bit is set
//        148  sum of the header's bytes, these eight taken as blanks
//        156  kind: '0' or 0 a file, '5' a folder, 'L' 'x' 'g' headers ahead
//        257  "ustar" and a zero: the prefix counts; GNU has "ustar  "
//        345  prefix of the name, 155 bytes
#include "data/tar/tar_file.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera {
namespace {

constexpr int64_t kBlock = 512;

// Returns a field up to its first zero.
absl::string_view Text(const uint8_t* header, size_t at, size_t length) {
  const absl::string_view field(reinterpret_cast<const char*>(header) + at,
                                length);
  return field.substr(0, field.find('\0'));
}

// Reads octal digits between blanks, or base 256; absent if it is neither, or
// does not fit.
std::optional<int64_t> Number(const uint8_t* field, size_t length) {
  int64_t value = 0;
  if (field[0] & 0x80) {
    if (field[0] != 0x80) return std::nullopt;  // negative, or more than 2^88
    for (size_t i = 1; i < length; ++i) {
      if (value >> 54 != 0) return std::nullopt;
      value = value << 8 | field[i];
    }
    return value;
  }
  size_t i = 0;
  while (i < length && field[i] == ' ') ++i;
  const size_t first = i;
  for (; i < length && field[i] >= '0' && field[i] <= '7'; ++i) {
    value = value << 3 | (field[i] - '0');  // at most 36 bits
  }
  if (i == first) return std::nullopt;
  for (; i < length; ++i) {
    if (field[i] != ' ' && field[i] != '\0') return std::nullopt;
  }
  return value;
}

// Returns whether the sum is right for signed or unsigned bytes: programs have
// written both.
bool SumIsRight(const uint8_t* header) {
  const std::optional<int64_t> said = Number(header + 148, 8);
  int64_t of_unsigned = 8 * ' ', of_signed = 8 * ' ';
  for (int64_t i = 0; i < kBlock; ++i) {
    if (i >= 148 && i < 156) continue;
    of_unsigned += header[i];
    of_signed += static_cast<int8_t>(header[i]);
  }
  return said == of_unsigned || said == of_signed;
}

// Returns whether the size means nothing for the kind: links, devices, folders,
// pipes.
bool HasNoContent(uint8_t kind) { return kind >= '1' && kind <= '6'; }

class Reader {
 public:
  Reader(absl::Span<const uint8_t> archive, absl::string_view path,
         absl::FunctionRef<absl::Status(const TarMember&)> use)
      : archive_(archive), path_(path), use_(use) {}

  absl::Status Run() {
    while (true) {
      TESSERA_ASSIGN_OR_RETURN(const bool more, Next());
      if (!more) return absl::OkStatus();
    }
  }

 private:
  int64_t archive_bytes() const {
    return static_cast<int64_t>(archive_.size());
  }

  absl::Status Damaged(int64_t at, absl::string_view what) const {
    return absl::DataLossError(absl::StrCat(path_, ": byte ", at, ": ", what));
  }

  absl::StatusOr<bool> Next();
  absl::StatusOr<bool> AtEnd() const;
  absl::Status ReadPax(int64_t begin, absl::string_view records);
  absl::Status UsePax(int64_t at, absl::string_view key,
                      absl::string_view value);
  absl::Status UseMember(const uint8_t* header, int64_t begin, int64_t size);

  const absl::Span<const uint8_t> archive_;
  const absl::string_view path_;
  const absl::FunctionRef<absl::Status(const TarMember&)> use_;
  int64_t at_ = 0;  // position of the next header
  // What headers have said about the next member.
  std::optional<int64_t> first_header_;
  std::optional<std::string> long_name_;
  std::optional<int64_t> long_size_;
};

// Returns whether two blocks of zeros follow, or one that is the last.
absl::StatusOr<bool> Reader::AtEnd() const {
  const auto zeros = [this](int64_t at) {
    const auto* block = archive_.data() + at;
    return std::all_of(block, block + kBlock, [](uint8_t b) { return b == 0; });
  };
  if (!zeros(at_)) return false;
  if (at_ + 2 * kBlock > archive_bytes() || zeros(at_ + kBlock)) return true;
  return Damaged(at_, "a block of zeros within the archive");
}

absl::StatusOr<bool> Reader::Next() {
  if (at_ + kBlock > archive_bytes()) {
    return Damaged(archive_bytes(),
                   "the archive ends without its end, two blocks of zeros; is "
                   "it truncated?");
  }
  TESSERA_ASSIGN_OR_RETURN(const bool end, AtEnd());
  if (end) {
    if (!first_header_.has_value()) return false;
    return Damaged(at_, "the archive ends behind a header of a long name");
  }
  const uint8_t* const header = archive_.data() + at_;
  if (!SumIsRight(header)) {
    return Damaged(at_,
                   "the sum of this header is wrong; is it a tar archive, "
                   "not packed, and whole?");
  }
  const uint8_t kind = header[156];
  const bool ahead = kind == 'L' || kind == 'K' || kind == 'x' || kind == 'g';
  const std::optional<int64_t> own_size = Number(header + 124, 12);
  if (!own_size.has_value() && !HasNoContent(kind)) {
    return Damaged(at_ + 124, "the size of this member is not a number");
  }
  int64_t size = ahead ? *own_size : long_size_.value_or(own_size.value_or(0));
  if (HasNoContent(kind)) size = 0;
  const int64_t begin = at_ + kBlock;
  if (size > archive_bytes() - begin) {
    return Damaged(
        at_, absl::StrCat(
                 "the member ",
                 long_name_.value_or(std::string(Text(header, 0, 100))),
                 " has ", size, " bytes, of which ", archive_bytes() - begin,
                 " are there; is the archive truncated?"));
  }
  const absl::string_view content(
      reinterpret_cast<const char*>(archive_.data()) + begin,
      static_cast<size_t>(size));
  if (ahead) {
    // What 'g' says about all members is no name and no size; 'K' is about
    // links.
    if (kind != 'g' && !first_header_.has_value()) first_header_ = at_;
    if (kind == 'L')
      long_name_ = std::string(content.substr(0, content.find('\0')));
    if (kind == 'x') TESSERA_RETURN_IF_ERROR(ReadPax(begin, content));
  } else {
    TESSERA_RETURN_IF_ERROR(UseMember(header, begin, size));
  }
  at_ = begin + (size + kBlock - 1) / kBlock * kBlock;
  return true;
}

absl::Status Reader::UseMember(const uint8_t* header, int64_t begin,
                               int64_t size) {
  const uint8_t kind = header[156];
  TarMember member;
  member.header = first_header_.value_or(at_);
  member.begin = begin;
  member.size = size;
  if (long_name_.has_value()) {
    member.name = *std::move(long_name_);
  } else {
    const absl::string_view prefix = Text(header, 345, 155);
    if (Text(header, 257, 6) == "ustar" && !prefix.empty()) {
      member.name = absl::StrCat(prefix, "/");
    }
    absl::StrAppend(&member.name, Text(header, 0, 100));
  }
  first_header_.reset();
  long_name_.reset();
  long_size_.reset();
  if (kind == 'S') {
    return absl::UnimplementedError(
        absl::StrCat(path_, ": byte ", at_, ": ", member.name,
                     " is a sparse file; write the archive without --sparse"));
  }
  const bool file = kind == '0' || kind == '\0' || kind == '7';
  // Before ustar, a folder was a file whose name ended so.
  if (!file || absl::EndsWith(member.name, "/")) return absl::OkStatus();
  return use_(member);
}

// Reads records of "LENGTH KEY=VALUE\n", LENGTH of the whole record.
absl::Status Reader::ReadPax(int64_t begin, absl::string_view records) {
  int64_t at = begin;
  while (!records.empty()) {
    const size_t blank = records.find(' ');
    int64_t length = 0;
    const bool number = blank != absl::string_view::npos && blank < 12 &&
                        absl::SimpleAtoi(records.substr(0, blank), &length);
    if (!number || length <= static_cast<int64_t>(blank) + 1 ||
        length > static_cast<int64_t>(records.size()) ||
        records[static_cast<size_t>(length) - 1] != '\n') {
      return Damaged(at, "this is no record of a pax header");
    }
    const absl::string_view record =
        records.substr(blank + 1, static_cast<size_t>(length) - blank - 2);
    const size_t equals = record.find('=');
    if (equals == absl::string_view::npos) {
      return Damaged(at, "this is no record of a pax header");
    }
    TESSERA_RETURN_IF_ERROR(
        UsePax(at, record.substr(0, equals), record.substr(equals + 1)));
    records.remove_prefix(static_cast<size_t>(length));
    at += length;
  }
  return absl::OkStatus();
}

absl::Status Reader::UsePax(int64_t at, absl::string_view key,
                            absl::string_view value) {
  if (key == "path") long_name_ = std::string(value);
  if (key == "size") {
    int64_t size;
    if (!absl::SimpleAtoi(value, &size) || size < 0) {
      return Damaged(at, "the size in this pax header is not a number");
    }
    long_size_ = size;
  }
  if (absl::StartsWith(key, "GNU.sparse.")) {
    return absl::UnimplementedError(
        absl::StrCat(path_, ": byte ", at,
                     ": a sparse file; write the archive without --sparse"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ForEachTarMember(
    absl::Span<const uint8_t> archive, absl::string_view path,
    absl::FunctionRef<absl::Status(const TarMember&)> use) {
  return Reader(archive, path, use).Run();
}

}  // namespace tessera
