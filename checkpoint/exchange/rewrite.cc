#include "checkpoint/exchange/rewrite.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "checkpoint/exchange/batches.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "checkpoint/format/data_file.h"
#include "checkpoint/format/manifest.h"

namespace tessera {
namespace {

constexpr int64_t kCutNumbers = 64;
constexpr char kClientState[] = "client_state";  // docs/checkpoint_format.md

class Resharding {
 public:
  Resharding(CheckpointReader* reader, Saving* saving, int num_files,
             const RewriteProgress& progress)
      : reader_(*reader),
        manifest_(reader->manifest()),
        saving_(*saving),
        num_files_(num_files),
        progress_(progress) {
    for (const auto& storage : manifest_.storages()) {
      for (const auto& state : storage.states()) {
        total_ += storage.numel() * DtypeBytes(state.dtype());
      }
    }
  }

  absl::Status Run(bool* committed) {
    proto::CheckpointManifest manifest = manifest_;
    manifest.set_id(saving_.id());
    manifest.clear_files();
    for (int r = 0; r < num_files_; ++r) {
      TESSERA_ASSIGN_OR_RETURN(*manifest.add_files(), WriteFile(r));
    }
    return saving_.Commit(manifest, committed);
  }

 private:
  absl::StatusOr<proto::CheckpointFile> WriteFile(int rank) {
    TESSERA_ASSIGN_OR_RETURN(
        DataFileWriter writer,
        DataFileWriter::Create(saving_.folder(), saving_.id(), rank));
    TESSERA_RETURN_IF_ERROR(AddPieces(rank, &writer));
    // Only the program's own text survives, since other ranks load it.
    TESSERA_ASSIGN_OR_RETURN(const auto values,
                             reader_.ValuesOf(rank % manifest_.files_size()));
    for (const auto& value : values) {
      if (rank < manifest_.files_size() || value.name() == kClientState) {
        writer.AddValue(value.name(), value.value());
      }
    }
    return writer.Finish();
  }

  absl::Status AddPieces(int rank, DataFileWriter* writer) {
    std::vector<WantedElements> pieces;
    for (int s = 0; s < manifest_.storages_size(); ++s) {
      const proto::CheckpointStorage& storage = manifest_.storages(s);
      const int64_t cuts = (storage.numel() + kCutNumbers - 1) / kCutNumbers;
      const auto cut = [&](int64_t part) {
        return std::min(storage.numel(),
                        cuts * part / num_files_ * kCutNumbers);
      };
      for (int i = 0; i < storage.states_size(); ++i) {
        pieces.push_back({s, i, cut(rank), cut(rank + 1)});
      }
    }
    return ReadInBatches(
        {{&reader_, pieces}}, [&](size_t number, int64_t begin,
                                  absl::Span<const absl::string_view> bytes) {
          return AddPart(pieces[number], begin, bytes[0], writer);
        });
  }

  absl::Status AddPart(const WantedElements& piece, int64_t begin,
                       absl::string_view bytes, DataFileWriter* writer) {
    if (begin == piece.begin) {
      const int64_t n = piece.end - piece.begin;
      const std::string& dtype =
          manifest_.storages(piece.storage).states(piece.state).dtype();
      TESSERA_RETURN_IF_ERROR(writer->BeginPiece(
          piece.storage, piece.state, begin, n, n * DtypeBytes(dtype)));
    }
    TESSERA_RETURN_IF_ERROR(writer->AddPart(bytes));
    done_ += static_cast<int64_t>(bytes.size());
    if (progress_) progress_(done_, total_);
    return absl::OkStatus();
  }

  CheckpointReader& reader_;
  const proto::CheckpointManifest& manifest_;
  Saving& saving_;
  const int num_files_;
  const RewriteProgress& progress_;
  int64_t done_ = 0, total_ = 0;
};

}  // namespace

absl::Status ExportSafetensors(const std::string& dir, const std::string& to,
                               const SafetensorsExportOptions& options,
                               const RewriteProgress& progress,
                               FileSystem* files) {
  TESSERA_ASSIGN_OR_RETURN(CheckpointReader reader,
                           CheckpointReader::OpenToStay(dir, files));
  const proto::CheckpointManifest& manifest = reader.manifest();
  TESSERA_ASSIGN_OR_RETURN(
      SafetensorsExport exported,
      SafetensorsExport::Plan(to, manifest, options, files));
  int64_t done = 0, total = 0;
  std::vector<WantedElements> values;
  for (int s = 0; s < manifest.storages_size(); ++s) {
    const proto::CheckpointStorage& storage = manifest.storages(s);
    const int value = ValueState(storage);
    if (value < 0) continue;
    values.push_back({s, value, 0, storage.numel()});
    total += storage.numel() * DtypeBytes(storage.states(value).dtype());
  }
  const auto write = [&]() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(exported.Create());
    TESSERA_RETURN_IF_ERROR(ReadInBatches(
        {{&reader, values}}, [&](size_t number, int64_t begin,
                                 absl::Span<const absl::string_view> bytes) {
          done += static_cast<int64_t>(bytes[0].size());
          if (progress) progress(done, total);
          return exported.Write(values[number].storage, begin, bytes[0]);
        }));
    TESSERA_RETURN_IF_ERROR(exported.Sync());
    return exported.Commit();
  };
  const absl::Status status = write();
  if (!status.ok()) exported.Abandon();
  return status;
}

absl::Status ReshardCheckpoint(const std::string& dir, const std::string& to,
                               int num_files, const RewriteProgress& progress,
                               FileSystem* files) {
  if (num_files < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected at least one file, got ", num_files));
  }
  TESSERA_ASSIGN_OR_RETURN(CheckpointReader reader,
                           CheckpointReader::OpenToStay(dir, files));
  TESSERA_ASSIGN_OR_RETURN(Saving saving, Saving::Begin(to, files));
  const auto there = ReadManifest(saving.folder());
  if (there.ok() && there->id() == reader.manifest().id()) {
    return absl::InvalidArgumentError(
        absl::StrCat(to, ": is the checkpoint itself; name another folder"));
  }
  bool committed = false;
  const absl::Status status =
      Resharding(&reader, &saving, num_files, progress).Run(&committed);
  if (!status.ok() && !committed) saving.Abandon();
  return status;
}

}  // namespace tessera
