#include "engine/checkpoint/safetensors_saving.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "checkpoint/exchange/safetensors_export.h"
#include "checkpoint/save/saved_pieces.h"
#include "checkpoint/together.h"

namespace tessera {
namespace {

constexpr char kSaving[] = "SaveSafetensors";
constexpr int64_t kPartBytes = 16 << 20;

absl::StatusOr<SafetensorsExport> Plan(const CheckpointContent& content,
                                       const std::string& dir,
                                       const SaveSafetensorsOptions& options) {
  SafetensorsExportOptions to;
  to.names = options.names;
  to.max_file_bytes = options.max_file_bytes;
  if (options.dtype == "fp32" || options.dtype == "bf16") {
    to.dtype = options.dtype == "fp32" ? "F32" : "BF16";
  } else if (!options.dtype.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "dtype '", options.dtype, "': expected fp32, bf16 or nothing"));
  }
  return SafetensorsExport::Plan(dir, content.head, std::move(to),
                                 FileSystem::Real());
}

// The values that this rank has to write.
absl::Status WriteOwn(CheckpointContent content, SafetensorsExport* files) {
  const proto::CheckpointManifest& head = content.head;
  SavedPieces pieces(std::move(content.pieces));
  std::string scratch;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const SavedPiece& piece = pieces[i];
    if (piece.state != ValueState(head.storages(piece.storage))) continue;
    const int64_t bytes = piece.bytes();
    const int64_t element = bytes / piece.numel();
    for (int64_t at = 0; at < bytes; at += kPartBytes) {
      TESSERA_ASSIGN_OR_RETURN(
          const absl::string_view part,
          pieces.Part(i, at, std::min(kPartBytes, bytes - at), &scratch));
      TESSERA_RETURN_IF_ERROR(
          files->Write(piece.storage, piece.begin + at / element, part));
    }
  }
  return files->Sync();
}

}  // namespace

absl::Status WriteSafetensorsOf(const TrainingState& state,
                                const std::string& dir,
                                const SaveSafetensorsOptions& options) {
  Communicator* const comm = state.comm();
  TESSERA_RETURN_IF_ERROR(comm->AgreeEqual(dir, "folder of safetensors files"));
  TESSERA_ASSIGN_OR_RETURN(CheckpointContent content, ContentOf(state, ""));
  AwaitDevices(content.pieces);
  absl::StatusOr<SafetensorsExport> files = absl::UnknownError("not planned");
  TESSERA_RETURN_IF_ERROR(RunTogether(comm, kSaving, [&] {
    files = Plan(content, dir, options);
    return files.status();
  }));
  TESSERA_RETURN_IF_ERROR(
      comm->AgreeEqual(files->Fingerprint(), "plan of safetensors files"));
  const bool leads = comm->rank() == 0;
  absl::Status status = RunTogether(comm, kSaving, [&] {
    return leads ? files->Create() : absl::OkStatus();
  });
  if (status.ok()) {
    status = RunTogether(comm, kSaving,
                         [&] { return WriteOwn(std::move(content), &*files); });
  }
  if (status.ok()) {
    status = RunTogether(comm, kSaving, [&] {
      return leads ? files->Commit() : absl::OkStatus();
    });
  }
  if (!status.ok() && leads) files->Abandon();
  return status;
}

}  // namespace tessera
