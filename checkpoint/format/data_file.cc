// Small pieces are collected, and large ones written from where they lie: a
// model has thousands of biases of a few KiB, each of which would cost a system
// call.
#include "checkpoint/format/data_file.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/status.h"
#include "checkpoint/format/manifest.h"

namespace tessera {
namespace {

constexpr size_t kBufferBytes = 1 << 20;
// Bytes written since the disk was told to begin.
constexpr int64_t kStartBytes = 16 << 20;
// Pieces begin at multiples of this; large ones at a page.
constexpr int64_t kAlign = 64, kPage = 4096;

int64_t Aligned(int64_t offset, int64_t bytes) {
  const int64_t align = bytes < kPage ? kAlign : kPage;
  return (offset + align - 1) / align * align;
}

}  // namespace

absl::StatusOr<DataFileWriter> DataFileWriter::Create(const Folder& folder,
                                                      uint64_t id, int rank) {
  TESSERA_ASSIGN_OR_RETURN(File file,
                           folder.CreateFile(DataFileName(id, rank)));
  return DataFileWriter(std::move(file));
}

absl::Status DataFileWriter::Add(int storage, int state, int64_t begin,
                                 int64_t n, absl::string_view bytes) {
  TESSERA_RETURN_IF_ERROR(
      BeginPiece(storage, state, begin, n, static_cast<int64_t>(bytes.size())));
  return AddPart(bytes);
}

absl::Status DataFileWriter::BeginPiece(int storage, int state, int64_t begin,
                                        int64_t n, int64_t bytes) {
  const int64_t end = written_ + static_cast<int64_t>(buffer_.size());
  const int64_t offset = Aligned(end, bytes);
  TESSERA_RETURN_IF_ERROR(
      Append(std::string(static_cast<size_t>(offset - end), '\0')));
  proto::CheckpointPiece* const piece = index_.add_pieces();
  piece->set_storage(storage);
  piece->set_state(state);
  piece->set_begin(begin);
  piece->set_end(begin + n);
  piece->set_offset(offset);
  return absl::OkStatus();
}

absl::Status DataFileWriter::AddPart(absl::string_view part) {
  proto::CheckpointPiece* const piece =
      index_.mutable_pieces(index_.pieces_size() - 1);
  // Compute the checksums of what the next call writes, while it is in the
  // caches.
  for (size_t at = 0; at < part.size(); at += kPartBytes) {
    const absl::string_view next = part.substr(at, kPartBytes);
    for (size_t block = 0; block < next.size(); block += kBlockBytes) {
      piece->add_block_crcs(Crc32c(next.substr(block, kBlockBytes)));
    }
    TESSERA_RETURN_IF_ERROR(Append(next));
  }
  return absl::OkStatus();
}

void DataFileWriter::AddValue(const std::string& name,
                              const std::string& value) {
  proto::CheckpointValue* const added = index_.add_values();
  added->set_name(name);
  added->set_value(value);
}

absl::Status DataFileWriter::SyncSoFar() {
  TESSERA_RETURN_IF_ERROR(Flush());
  return file_.Sync();
}

absl::StatusOr<proto::CheckpointFile> DataFileWriter::Finish() {
  proto::CheckpointFile result;
  TESSERA_ASSIGN_OR_RETURN(const std::string index,
                           EncodeIndex(index_, &result));
  result.set_index_offset(written_ + static_cast<int64_t>(buffer_.size()));
  TESSERA_RETURN_IF_ERROR(Append(index));
  TESSERA_RETURN_IF_ERROR(Flush());
  result.set_bytes(written_);
  TESSERA_RETURN_IF_ERROR(file_.Sync());
  return result;
}

absl::Status DataFileWriter::Append(absl::string_view bytes) {
  if (buffer_.size() + bytes.size() <= kBufferBytes) {
    buffer_.append(bytes.data(), bytes.size());
    return absl::OkStatus();
  }
  TESSERA_RETURN_IF_ERROR(Flush());
  return Put(bytes);
}

absl::Status DataFileWriter::Flush() {
  TESSERA_RETURN_IF_ERROR(Put(buffer_));
  buffer_.clear();
  return absl::OkStatus();
}

absl::Status DataFileWriter::Put(absl::string_view bytes) {
  if (bytes.empty()) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(file_.WriteAt(written_, bytes));
  written_ += static_cast<int64_t>(bytes.size());
  // The disk works while the next bytes are copied, and not only in Finish.
  if (written_ - started_ >= kStartBytes) {
    file_.StartSync(started_, written_ - started_);
    started_ = written_;
  }
  return absl::OkStatus();
}

namespace {

// Names the storages that a file has pieces of: "'a' and 3 more tensors".
std::string TensorsOf(const proto::CheckpointManifest& manifest, int rank) {
  const auto& ranges = manifest.files(rank).storage_ranges();
  int64_t storages = 0;
  for (int i = 1; i < ranges.size(); i += 2) storages += ranges[i];
  if (storages == 0) return "no tensor";
  // The first range may be empty in a file that another program has written.
  int64_t first = ranges[0];
  for (int i = 1; ranges[i] == 0; i += 2) first += ranges[i + 1];
  return absl::StrCat(
      "'", manifest.storages(static_cast<int>(first)).tensors(0).name(), "'",
      storages == 1 ? "" : absl::StrCat(" and ", storages - 1, " more"));
}

}  // namespace

absl::StatusOr<DataFileReader> DataFileReader::Open(
    const Folder& folder, const proto::CheckpointManifest& manifest, int rank) {
  TESSERA_ASSIGN_OR_RETURN(File file,
                           folder.OpenFile(DataFileName(manifest.id(), rank)));
  const int64_t expected = manifest.files(rank).bytes();
  if (file.bytes() != expected) {
    // The index, which is at the end, would say which elements are missing.
    return absl::DataLossError(absl::StrCat(
        file.path(), ": has ", file.bytes(), " bytes, expected ", expected,
        file.bytes() > expected
            ? ""
            : absl::StrCat("; bytes ", file.bytes(), " to ", expected,
                           " are missing, which may be those of ",
                           TensorsOf(manifest, rank))));
  }
  return DataFileReader(std::move(file), rank);
}

absl::StatusOr<std::string> DataFileReader::IndexBytes(
    const proto::CheckpointManifest& manifest) const {
  const proto::CheckpointFile& file = manifest.files(rank_);
  std::string bytes(static_cast<size_t>(file.index_bytes()), '\0');
  TESSERA_RETURN_IF_ERROR(
      file_.ReadAt(file.index_offset(), bytes.data(), file.index_bytes()));
  return bytes;
}

absl::StatusOr<proto::CheckpointIndex> DataFileReader::ReadIndex(
    const proto::CheckpointManifest& manifest) const {
  TESSERA_ASSIGN_OR_RETURN(const std::string bytes, IndexBytes(manifest));
  return DecodeIndex(bytes, manifest, rank_, path());
}

DataFileReader::Call DataFileReader::CallAt(int64_t piece_bytes, int64_t at,
                                            int64_t end, int64_t most) {
  const int64_t begin = at / kBlockBytes * kBlockBytes;
  const int64_t block_end = std::min(begin + kBlockBytes, piece_bytes);
  if (at != begin || block_end > end) return {begin, block_end, false};
  // Take the blocks that are wanted as a whole.
  const int64_t last =
      end == piece_bytes ? end : end / kBlockBytes * kBlockBytes;
  return {begin, std::min(last, begin + most), true};
}

absl::Status DataFileReader::Verify(const proto::CheckpointPiece& piece,
                                    const Call& call, const char* bytes,
                                    absl::string_view what) const {
  for (int64_t b = call.begin; b < call.end; b += kBlockBytes) {
    const absl::string_view block(
        bytes + (b - call.begin),
        static_cast<size_t>(std::min(kBlockBytes, call.end - b)));
    if (Crc32c(block) == piece.block_crcs(static_cast<int>(b / kBlockBytes))) {
      continue;
    }
    return absl::DataLossError(
        absl::StrCat(path(), ": ", what, ", bytes ", piece.offset() + b, " to ",
                     piece.offset() + b + static_cast<int64_t>(block.size()),
                     ", are not what was written (their checksum differs)"));
  }
  return absl::OkStatus();
}

absl::Status DataFileReader::CheckZeros(int64_t begin, int64_t end,
                                        int64_t* read) const {
  char bytes[kPage];
  while (begin < end) {
    const int64_t n = std::min(end - begin, kPage);
    TESSERA_RETURN_IF_ERROR(file_.ReadAt(begin, bytes, n));
    *read += n;
    const char* const found =
        std::find_if(bytes, bytes + n, [](char byte) { return byte != 0; });
    if (found != bytes + n) {
      const int64_t at = begin + (found - bytes);
      return absl::DataLossError(absl::StrCat(
          path(), ": bytes ", at, " to ", at + 1,
          ", between tensors, are not what was written (expected 0)"));
    }
    begin += n;
  }
  return absl::OkStatus();
}

}  // namespace tessera
