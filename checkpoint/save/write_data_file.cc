#include "checkpoint/save/write_data_file.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "checkpoint/disk/folder.h"
#include "checkpoint/format/data_file.h"

namespace tessera {
namespace {

constexpr absl::Duration kLimitedSync = absl::Seconds(1);

// Limits writes to max_bandwidth, and keeps the system from writing all at the
// end.
class Throttle {
 public:
  explicit Throttle(int64_t max_bandwidth) : max_bandwidth_(max_bandwidth) {}

  absl::Status Wrote(int64_t bytes, SavedPieces* pieces,
                     DataFileWriter* writer) {
    if (max_bandwidth_ <= 0) return absl::OkStatus();
    written_ += bytes;
    const absl::Duration due =
        begun_ + absl::Seconds(static_cast<double>(written_) /
                               static_cast<double>(max_bandwidth_));
    while (MonotonicNow() < due && !pieces->awaited()) {
      if (pieces->abandoned()) {
        return absl::CancelledError("the save was given up");
      }
      absl::SleepFor(std::min(due - MonotonicNow(), absl::Milliseconds(100)));
    }
    if (MonotonicNow() - synced_ < kLimitedSync) return absl::OkStatus();
    synced_ = MonotonicNow();
    return writer->SyncSoFar();
  }

 private:
  const int64_t max_bandwidth_;
  const absl::Duration begun_ = MonotonicNow();
  int64_t written_ = 0;
  absl::Duration synced_ = -absl::InfiniteDuration();
};

absl::StatusOr<proto::CheckpointFile> Write(
    const DataFileOptions& options,
    const std::vector<std::pair<std::string, std::string>>& values,
    SavedPieces* pieces) {
  TorchScope scope;
  TESSERA_ASSIGN_OR_RETURN(const Folder folder,
                           Folder::Open(options.dir, FileSystem::Real()));
  TESSERA_ASSIGN_OR_RETURN(
      DataFileWriter writer,
      DataFileWriter::Create(folder, options.id, options.rank));
  Throttle throttle(options.max_bandwidth);
  std::string scratch;
  for (size_t i = 0; i < pieces->size(); ++i) {
    const SavedPiece& piece = (*pieces)[i];
    const int64_t bytes = piece.bytes();
    TESSERA_RETURN_IF_ERROR(writer.BeginPiece(
        piece.storage, piece.state, piece.begin, piece.numel(), bytes));
    for (int64_t at = 0; at < bytes; at += kPartBytes) {
      const int64_t size = std::min(kPartBytes, bytes - at);
      TESSERA_ASSIGN_OR_RETURN(const absl::string_view part,
                               pieces->Part(i, at, size, &scratch));
      TESSERA_RETURN_IF_ERROR(writer.AddPart(part));
      TESSERA_RETURN_IF_ERROR(throttle.Wrote(size, pieces, &writer));
    }
    pieces->Written(i);
  }
  for (const auto& [name, value] : values) writer.AddValue(name, value);
  return writer.Finish();
}

}  // namespace

absl::StatusOr<proto::CheckpointFile> WriteDataFile(
    const DataFileOptions& options,
    const std::vector<std::pair<std::string, std::string>>& values,
    SavedPieces* pieces) {
  absl::StatusOr<proto::CheckpointFile> file = Write(options, values, pieces);
  if (!IsDiskFull(file.status())) return file;
  int64_t bytes = 0;
  for (size_t i = 0; i < pieces->size(); ++i) bytes += (*pieces)[i].bytes();
  const auto folder = Folder::Open(options.dir, FileSystem::Real());
  const int64_t free = folder.ok() ? folder->FreeBytes().value_or(0) : 0;
  return absl::Status(
      file.status().code(),
      absl::StrCat(file.status().message(), " (this file needs some ", bytes,
                   " bytes; beside what is written of it ", free,
                   " are free)"));
}

}  // namespace tessera
