// The frame of a manifest is:
//
//   "tsr ckpt"            8 bytes
//   L                     8 bytes, little-endian
//   CheckpointManifest    L bytes
//   CRC32C of all before  4 bytes, little-endian
#include "checkpoint/format/manifest.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/crc32c.h"
#include "base/status.h"
#include "checkpoint/format/manifest_check.h"
#include "google/protobuf/descriptor.h"

namespace tessera {
namespace {

constexpr absl::string_view kMagic = "tsr ckpt";
constexpr size_t kHeadBytes = kMagic.size() + sizeof(uint64_t);
constexpr size_t kCrcBytes = sizeof(uint32_t);
constexpr absl::string_view kTemporary = ".manifest";
constexpr absl::string_view kRank = ".rank-";
constexpr size_t kIdDigits = 16;

template <class T>
std::string BytesOf(T number) {
  return std::string(reinterpret_cast<const char*>(&number), sizeof(number));
}

template <class T>
T NumberIn(absl::string_view bytes) {
  T number;
  std::memcpy(&number, bytes.data(), sizeof(number));
  return number;
}

// Returns an error for a message that is too large, which protobuf does not
// report.
absl::StatusOr<std::string> Serialize(const google::protobuf::Message& message,
                                      absl::string_view what) {
  const size_t bytes = message.ByteSizeLong();
  if (bytes > kMostMessageBytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("checkpoint: ", what, " has ", bytes, " bytes, at most ",
                     kMostMessageBytes, " can be written"));
  }
  return message.SerializeAsString();
}

// Takes a varint off the front of `bytes`; returns false if there is none.
bool TakeVarint(absl::string_view* bytes, uint64_t* number) {
  *number = 0;
  for (size_t i = 0; i < bytes->size() && i < 10; ++i) {
    const auto byte = static_cast<unsigned char>((*bytes)[i]);
    *number |= uint64_t{byte & 0x7fu} << (7 * i);
    if (byte < 0x80) {
      bytes->remove_prefix(i + 1);
      return true;
    }
  }
  return false;
}

// Returns whether every part of a message lies within it. Protobuf notices a
// part that does not only at its end, after it has allocated as much as the
// part claims.
bool PartsFit(absl::string_view bytes,
              const google::protobuf::Descriptor& descriptor) {
  enum { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };
  while (!bytes.empty()) {
    uint64_t tag = 0, size = 0;
    if (!TakeVarint(&bytes, &tag) || tag >> 3 > INT_MAX) return false;
    switch (tag & 7) {
      case kVarint:
        if (!TakeVarint(&bytes, &size)) return false;
        size = 0;
        break;
      case kBytes:
        if (!TakeVarint(&bytes, &size)) return false;
        break;
      case kFixed64:
        size = sizeof(uint64_t);
        break;
      case kFixed32:
        size = sizeof(uint32_t);
        break;
      default:
        return false;  // groups, which our messages have none of
    }
    if (size > bytes.size()) return false;
    const absl::string_view part = bytes.substr(0, size);
    bytes.remove_prefix(size);
    const google::protobuf::FieldDescriptor* const field =
        descriptor.FindFieldByNumber(static_cast<int>(tag >> 3));
    if ((tag & 7) == kBytes && field != nullptr &&
        field->message_type() != nullptr &&
        !PartsFit(part, *field->message_type())) {
      return false;
    }
  }
  return true;
}

// Returns where the ranges of storages begin and end that a file has pieces of,
// ascending.
std::vector<int64_t> EdgesOf(const proto::CheckpointFile& file) {
  std::vector<int64_t> edges;
  int64_t at = 0;
  for (int64_t step : file.storage_ranges()) edges.push_back(at += step);
  return edges;
}

// Returns where `piece` ends, or why it cannot be in a file whose pieces lie in
// [`begin`, `end`) from here on.
absl::StatusOr<int64_t> EndOfPiece(const proto::CheckpointPiece& piece,
                                   const proto::CheckpointManifest& manifest,
                                   int64_t begin, int64_t end,
                                   const std::string& path) {
  if (piece.storage() < 0 || piece.storage() >= manifest.storages_size()) {
    return DamagedError(
        path, absl::StrCat("the index names storage ", piece.storage()));
  }
  const proto::CheckpointStorage& storage = manifest.storages(piece.storage());
  if (piece.state() < 0 || piece.state() >= storage.states_size() ||
      piece.begin() < 0 || piece.begin() >= piece.end() ||
      piece.end() > storage.numel()) {
    return DamagedError(
        path, absl::StrCat("the index names elements ", piece.begin(), " to ",
                           piece.end(), " of state ", piece.state(), " of '",
                           storage.tensors(0).name(), "'"));
  }
  const int64_t bytes = (piece.end() - piece.begin()) *
                        DtypeBytes(storage.states(piece.state()).dtype());
  const int64_t blocks = (bytes + kBlockBytes - 1) / kBlockBytes;
  if (piece.offset() < begin || piece.offset() > end ||
      bytes > end - piece.offset() || piece.block_crcs_size() != blocks) {
    return DamagedError(
        path, absl::StrCat("'", storage.tensors(0).name(), "' has ", bytes,
                           " bytes at byte ", piece.offset(), " and ",
                           piece.block_crcs_size(), " checksums"));
  }
  return piece.offset() + bytes;
}

}  // namespace

bool ParseMessage(absl::string_view bytes, google::protobuf::Message* message) {
  return bytes.size() <= INT_MAX &&
         PartsFit(bytes, *message->GetDescriptor()) &&
         message->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
}

std::string DataFileName(uint64_t id, int rank) {
  return absl::StrFormat("%016x%s%05d", id, kRank, rank);
}

std::string TemporaryManifestName(uint64_t id) {
  return absl::StrFormat("%016x%s", id, kTemporary);
}

std::optional<uint64_t> IdInName(absl::string_view name) {
  if (name.size() <= kIdDigits) return std::nullopt;
  const absl::string_view digits = name.substr(0, kIdDigits);
  absl::string_view rest = name.substr(kIdDigits);
  uint64_t id = 0;
  int rank = 0;
  if (!absl::SimpleHexAtoi(digits, &id)) return std::nullopt;
  if (rest == kTemporary && name == TemporaryManifestName(id)) return id;
  if (!absl::StartsWith(rest, kRank)) return std::nullopt;
  rest.remove_prefix(kRank.size());
  // The name must be exactly as we write it, so that a user's own file does not
  // match.
  if (!absl::SimpleAtoi(rest, &rank) || rank < 0 ||
      name != DataFileName(id, rank)) {
    return std::nullopt;
  }
  return id;
}

absl::StatusOr<std::string> EncodeManifest(
    const proto::CheckpointManifest& manifest) {
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           Serialize(manifest, "the manifest"));
  std::string bytes =
      absl::StrCat(kMagic, BytesOf(uint64_t{text.size()}), text);
  return absl::StrCat(bytes, BytesOf(Crc32c(bytes)));
}

bool BeginsAsManifest(absl::string_view bytes) {
  return bytes.size() < kMagic.size() ? absl::StartsWith(kMagic, bytes)
                                      : absl::StartsWith(bytes, kMagic);
}

absl::StatusOr<proto::CheckpointManifest> DecodeManifest(
    absl::string_view bytes, const std::string& path) {
  if (bytes.size() < kMagic.size() && BeginsAsManifest(bytes)) {
    return DamagedError(path,
                        absl::StrCat("it ends after ", bytes.size(), " bytes"));
  }
  if (!BeginsAsManifest(bytes)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": is no manifest of a checkpoint"));
  }
  if (bytes.size() > INT_MAX || bytes.size() < kHeadBytes + kCrcBytes ||
      bytes.size() - kHeadBytes - kCrcBytes !=
          NumberIn<uint64_t>(bytes.substr(kMagic.size()))) {
    return DamagedError(
        path, absl::StrCat("it has another length than the ", bytes.size(),
                           " bytes that are there"));
  }
  const size_t all = bytes.size() - kCrcBytes;
  if (Crc32c(bytes.substr(0, all)) != NumberIn<uint32_t>(bytes.substr(all))) {
    return DamagedError(path,
                        "it is not what was written (its checksum differs)");
  }
  proto::CheckpointManifest manifest;
  if (!ParseMessage(bytes.substr(kHeadBytes, all - kHeadBytes), &manifest)) {
    return DamagedError(path, "it cannot be read");
  }
  if (manifest.format_version() != kCheckpointFormat) {
    return absl::FailedPreconditionError(absl::StrCat(
        path, ": format ", manifest.format_version(),
        "; this version of Tessera reads format ", kCheckpointFormat,
        " (load it with the version that saved it, or move it away)"));
  }
  TESSERA_RETURN_IF_ERROR(CheckManifest(manifest, path));
  return manifest;
}

int64_t DtypeBytes(absl::string_view dtype) {
  static constexpr std::pair<absl::string_view, int64_t> kDtypes[] = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1},
      {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},
      {"U32", 4},  {"F32", 4}, {"I64", 8}, {"U64", 8},     {"F64", 8}};
  for (const auto& [name, bytes] : kDtypes) {
    if (name == dtype) return bytes;
  }
  return 0;
}

absl::StatusOr<std::string> EncodeIndex(const proto::CheckpointIndex& index,
                                        proto::CheckpointFile* file) {
  TESSERA_ASSIGN_OR_RETURN(
      std::string bytes,
      Serialize(index, "a rank's index, with its own values"));
  file->set_index_bytes(static_cast<int64_t>(bytes.size()));
  file->set_index_crc(Crc32c(bytes));
  std::vector<int> storages;
  for (const proto::CheckpointPiece& piece : index.pieces()) {
    storages.push_back(piece.storage());
  }
  std::sort(storages.begin(), storages.end());
  int64_t last = 0;
  for (size_t i = 0; i < storages.size();) {
    const int64_t begin = storages[i];
    int64_t end = begin;
    for (; i < storages.size() && storages[i] <= end; ++i)
      end = storages[i] + 1;
    file->add_storage_ranges(begin - last);
    file->add_storage_ranges(end - begin);
    last = end;
  }
  return bytes;
}

absl::StatusOr<proto::CheckpointIndex> DecodeIndex(
    absl::string_view bytes, const proto::CheckpointManifest& manifest,
    int rank, const std::string& path) {
  const proto::CheckpointFile& file = manifest.files(rank);
  if (Crc32c(bytes) != file.index_crc()) {
    return DamagedError(
        path, absl::StrCat("its index, bytes ", file.index_offset(), " to ",
                           file.bytes(),
                           ", is not what was written (its checksum "
                           "differs)"));
  }
  proto::CheckpointIndex index;
  if (!ParseMessage(bytes, &index)) {
    return DamagedError(path, "its index cannot be read");
  }
  const std::vector<int64_t> edges = EdgesOf(file);
  int64_t begin = 0;
  for (const proto::CheckpointPiece& piece : index.pieces()) {
    TESSERA_ASSIGN_OR_RETURN(
        begin, EndOfPiece(piece, manifest, begin, file.index_offset(), path));
    // A reader of a storage opens only the files that are said to have it.
    const auto after =
        std::upper_bound(edges.begin(), edges.end(), piece.storage());
    if ((after - edges.begin()) % 2 == 0) {
      return DamagedError(
          path,
          absl::StrCat("the index has elements of '",
                       manifest.storages(piece.storage()).tensors(0).name(),
                       "', the manifest says that it has none"));
    }
  }
  return index;
}

}  // namespace tessera
