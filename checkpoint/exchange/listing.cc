#include "checkpoint/exchange/listing.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/json.h"
#include "base/page/page_numbers.h"
#include "base/status.h"
#include "checkpoint/exchange/terminal.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/checkpoint_reader.h"

namespace tessera {
namespace {

constexpr int kListedLevels = 3;

int64_t BytesOf(const proto::CheckpointManifest& manifest) {
  int64_t bytes = 0;
  for (const auto& file : manifest.files()) bytes += file.bytes();
  return bytes;
}

int64_t ParametersOf(const proto::CheckpointManifest& manifest) {
  int64_t parameters = 0;
  for (const auto& storage : manifest.storages()) {
    if (!storage.buffer() && !storage.shaped_state()) {
      parameters += storage.numel();
    }
  }
  return parameters;
}

std::string SavedAt(const proto::CheckpointManifest& manifest,
                    absl::string_view format) {
  return absl::FormatTime(format,
                          absl::FromUnixMicros(manifest.saved_unix_micros()),
                          absl::UTCTimeZone());
}

std::string Counted(int64_t count, absl::string_view what) {
  return absl::StrCat(CountText(count), " ", what, count == 1 ? "" : "s");
}

std::string SizesText(const proto::CheckpointTensor& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.sizes(), ", "), "]");
}

absl::StatusOr<CheckpointReader> Open(const std::string& dir) {
  return CheckpointReader::Open(dir, FileSystem::Real());
}

// Writes a line for each tensor.
void ShowTensors(const proto::CheckpointManifest& manifest, std::ostream* out) {
  for (const auto& storage : manifest.storages()) {
    std::vector<std::string> states;
    for (const auto& state : storage.states()) {
      states.push_back(absl::StrCat(state.name(), " ", state.dtype()));
    }
    for (int t = 0; t < storage.tensors_size(); ++t) {
      const auto& tensor = storage.tensors(t);
      *out << "  " << Printable(tensor.name()) << " " << SizesText(tensor)
           << (storage.buffer() ? " buffer" : "");
      if (t > 0) {
        *out << " shares memory with " << Printable(storage.tensors(0).name())
             << "\n";
        continue;
      }
      *out << ": " << Printable(absl::StrJoin(states, ", "));
      if (tensor.has_steps()) *out << "; " << tensor.steps() << " steps";
      *out << "\n";
    }
  }
}

void ShowRun(const proto::CheckpointManifest& manifest, bool config,
             std::ostream* out) {
  const auto& training = manifest.training();
  if (training.has_optimizer()) {
    *out << "optimizer " << Printable(training.optimizer());
    if (training.has_learning_rate()) {
      *out << ", learning rate " << training.learning_rate();
    }
    *out << "\n";
  }
  if (training.has_loss_scale()) {
    *out << "loss scale " << training.loss_scale() << ", "
         << training.skipped_steps() << " steps skipped\n";
  }
  if (training.has_libtorch()) {
    *out << "libtorch " << Printable(training.libtorch()) << "\n";
  }
  if (training.has_config() && config) {
    *out << Printable(training.config(), /*keep=*/"\n") << "\n";
  }
  if (training.has_config() && !config) {
    *out << "(--config: its configuration)\n";
  }
}

std::string TensorsJson(const proto::CheckpointManifest& manifest) {
  std::vector<std::string> tensors;
  for (const auto& storage : manifest.storages()) {
    std::vector<std::string> states;
    for (const auto& state : storage.states()) {
      states.push_back(absl::StrCat(QuoteJson(Printable(state.name())), ": ",
                                    QuoteJson(Printable(state.dtype()))));
    }
    for (const auto& tensor : storage.tensors()) {
      tensors.push_back(absl::StrCat(
          "{\"name\": ", QuoteJson(Printable(tensor.name())),
          ", \"sizes\": ", SizesText(tensor),
          ", \"buffer\": ", storage.buffer() ? "true" : "false",
          ", \"memory_of\": ", QuoteJson(Printable(storage.tensors(0).name())),
          ", \"states\": {", absl::StrJoin(states, ", "), "}}"));
    }
  }
  return absl::StrCat("[", absl::StrJoin(tensors, ",\n  "), "]");
}

// Sums up files that belong to saves.
struct SavedFiles {
  int64_t count = 0, bytes = 0;

  std::string Text() const {
    return absl::StrCat(Counted(count, "file"), ", ", SizeText(bytes));
  }
};

absl::StatusOr<SavedFiles> SavedFilesIn(const Folder& folder,
                                        const std::string& path) {
  SavedFiles saved;
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                           folder.Names());
  for (const std::string& name : names) {
    if (!IdInName(name).has_value()) continue;
    ++saved.count;
    std::error_code error;
    const auto bytes =
        std::filesystem::file_size(std::filesystem::path(path) / name, error);
    if (!error) saved.bytes += static_cast<int64_t>(bytes);
  }
  return saved;
}

// Adds the folders below `dir`, those of `depth` levels, in order.
void AddFolders(const std::string& dir, int depth,
                std::vector<std::string>* folders) {
  std::vector<std::string> here;
  std::error_code error;
  std::filesystem::directory_iterator entries(dir, error);
  while (!error && entries != std::filesystem::directory_iterator()) {
    if (entries->is_directory(error)) here.push_back(entries->path());
    entries.increment(error);
  }
  std::sort(here.begin(), here.end());
  for (const std::string& folder : here) {
    folders->push_back(folder);
    if (depth > 1) AddFolders(folder, depth - 1, folders);
  }
}

absl::StatusOr<proto::CheckpointManifest> ManifestIn(const std::string& path) {
  TESSERA_ASSIGN_OR_RETURN(const Folder folder,
                           Folder::Open(path, FileSystem::Real()));
  return ReadManifest(folder);
}

}  // namespace

std::string CheckpointAt(const std::string& path) {
  if (!absl::IsNotFound(ManifestIn(path).status())) return path;
  std::vector<std::string> folders;
  AddFolders(path, 1, &folders);
  std::string newest = path;
  int64_t step = -1;
  for (const std::string& folder : folders) {
    const absl::StatusOr<proto::CheckpointManifest> manifest =
        ManifestIn(folder);
    if (!manifest.ok() || manifest->step() <= step) continue;
    step = manifest->step();
    newest = folder;
  }
  return newest;
}

std::string SummaryLine(const proto::CheckpointManifest& manifest) {
  const auto& training = manifest.training();
  std::string text = absl::StrCat("step ", manifest.step());
  if (training.has_samples()) {
    absl::StrAppend(&text, ", ", Counted(training.samples(), "sample"));
  }
  absl::StrAppend(&text, ", ", Counted(ParametersOf(manifest), "parameter"),
                  ", ", SizeText(BytesOf(manifest)), " in ",
                  Counted(manifest.files_size(), "file"));
  if (manifest.has_training()) {
    absl::StrAppend(&text, ", saved at stage ", training.stage(), " by ",
                    Counted(training.world_size(), "rank"));
  }
  if (manifest.has_saved_unix_micros()) {
    absl::StrAppend(&text, ", ", SavedAt(manifest, "%Y-%m-%d %H:%M:%S UTC"));
  }
  return text;
}

std::string SummaryMembers(const std::string& dir,
                           const proto::CheckpointManifest& manifest) {
  const auto& training = manifest.training();
  const auto number = [](bool has, int64_t value) {
    return has ? absl::StrCat(value) : std::string("null");
  };
  const bool trained = manifest.has_training();
  return absl::StrCat(
      "\"path\": ", QuoteJson(Printable(dir)), ", \"step\": ", manifest.step(),
      ", \"samples\": ", number(training.has_samples(), training.samples()),
      ", \"parameters\": ", ParametersOf(manifest),
      ", \"bytes\": ", BytesOf(manifest),
      ", \"files\": ", manifest.files_size(),
      ", \"stage\": ", number(trained, training.stage()),
      ", \"world_size\": ", number(trained, training.world_size()),
      ", \"saved\": ",
      manifest.has_saved_unix_micros()
          ? QuoteJson(SavedAt(manifest, "%Y-%m-%dT%H:%M:%SZ"))
          : "null");
}

absl::Status ListCheckpoints(const std::string& dir, bool json,
                             std::ostream* out) {
  std::vector<std::string> folders = {dir}, lines;
  AddFolders(dir, kListedLevels, &folders);
  int damaged = 0;
  for (const std::string& folder : folders) {
    const absl::StatusOr<CheckpointReader> reader = Open(folder);
    if (absl::IsNotFound(reader.status())) continue;
    if (!reader.ok()) {
      // The message begins with the path.
      const std::string why = Printable(reader.status().message());
      lines.push_back(
          json ? absl::StrCat("{\"path\": ", QuoteJson(Printable(folder)),
                              ", \"error\": ", QuoteJson(why), "}")
               : why);
      ++damaged;
    } else if (json) {
      lines.push_back(
          absl::StrCat("{", SummaryMembers(folder, reader->manifest()), "}"));
    } else {
      lines.push_back(absl::StrCat(Printable(folder), ": ",
                                   SummaryLine(reader->manifest())));
    }
  }
  if (json) {
    *out << "[" << absl::StrJoin(lines, ",\n ") << "]\n";
  } else if (!lines.empty()) {
    *out << absl::StrJoin(lines, "\n") << "\n";
  }
  if (lines.empty()) {
    return absl::NotFoundError(absl::StrCat(dir, ": contains no checkpoint"));
  }
  if (damaged == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      dir, ": ", damaged, " of ", lines.size(), " checkpoints cannot be read"));
}

absl::Status ShowCheckpoint(const std::string& dir, bool json, bool config,
                            std::ostream* out) {
  TESSERA_ASSIGN_OR_RETURN(const CheckpointReader reader, Open(dir));
  const proto::CheckpointManifest& manifest = reader.manifest();
  if (json) {
    *out << "{" << SummaryMembers(dir, manifest)
         << ",\n \"tensors\": " << TensorsJson(manifest);
    if (manifest.training().has_config() && config) {
      *out << ",\n \"config\": " << QuoteJson(manifest.training().config());
    }
    *out << "}\n";
    return absl::OkStatus();
  }
  *out << SummaryLine(manifest) << "\n";
  ShowTensors(manifest, out);
  ShowRun(manifest, config, out);
  return absl::OkStatus();
}

absl::StatusOr<Removable> FindRemovable(const std::string& path,
                                        FileSystem* files) {
  TESSERA_ASSIGN_OR_RETURN(const Folder folder, Folder::Open(path, files));
  const absl::StatusOr<proto::CheckpointManifest> manifest =
      ReadManifest(folder);
  if (manifest.ok()) return Removable{false, SummaryLine(*manifest)};
  if (absl::IsFailedPrecondition(manifest.status())) return manifest.status();
  TESSERA_ASSIGN_OR_RETURN(const SavedFiles saved, SavedFilesIn(folder, path));
  if (!absl::IsNotFound(manifest.status())) {
    return Removable{false, absl::StrCat("a checkpoint that cannot be read, ",
                                         saved.Text())};
  }
  if (saved.count == 0) return manifest.status();
  return Removable{true, absl::StrCat("an unfinished save, ", saved.Text())};
}

}  // namespace tessera
