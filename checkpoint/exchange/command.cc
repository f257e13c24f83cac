#include "checkpoint/exchange/command.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <new>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "checkpoint/exchange/diff.h"
#include "checkpoint/exchange/rewrite.h"
#include "checkpoint/exchange/terminal.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/checkpoint_reader.h"

namespace tessera {
namespace {

constexpr char kUsage[] =
    "tessera checkpoint COMMAND ...\n"
    "\n"
    "  ls DIR        the checkpoints in DIR and in its folders\n"
    "  show DIR      its tensors, states, files, and the run that saved it\n"
    "  verify DIR    reads all of it: every checksum, every element once\n"
    "  diff A B      what differs, numbers by how much at most\n"
    "  rm DIR        removes it, and no other file\n"
    "  export DIR OUT [--dtype=fp32|bf16] [--names=gpt2|FILE]\n"
    "                [--max_file_bytes=N]\n"
    "                its values as safetensors files, as Hugging Face's\n"
    "                libraries read them; FILE: "
    "checkpoint/exchange/name_map.h\n"
    "  import FILES OUT [--names=gpt2|FILE]\n"
    "                the other way: values alone, for\n"
    "                LoadCheckpointOptions::model_only\n"
    "  reshard DIR OUT --files=N\n"
    "                the same in N files (no need to: any number of ranks\n"
    "                loads any number of files)\n";
constexpr int kThreads = 4;  // threads that verify

using Args = std::vector<std::string>;

int64_t BytesOf(const proto::CheckpointManifest& manifest) {
  int64_t bytes = 0;
  for (const auto& file : manifest.files()) bytes += file.bytes();
  return bytes;
}

std::string Summary(const proto::CheckpointManifest& manifest) {
  int64_t parameters = 0;
  for (const auto& storage : manifest.storages()) {
    if (!storage.buffer() && !storage.shaped_state())
      parameters += storage.numel();
  }
  const auto& training = manifest.training();
  return absl::StrCat(
      "step ", manifest.step(),
      training.has_samples()
          ? absl::StrCat(", ", training.samples(), " samples")
          : "",
      ", ", parameters, " numbers of parameters, ", SizeText(BytesOf(manifest)),
      " in ", manifest.files_size(),
      manifest.files_size() == 1 ? " file" : " files",
      manifest.has_training()
          ? absl::StrCat(", saved at stage ", training.stage(), " by ",
                         training.world_size(),
                         training.world_size() == 1 ? " rank" : " ranks")
          : "",
      manifest.has_saved_unix_micros()
          ? absl::FormatTime(", %Y-%m-%d %H:%M:%S UTC",
                             absl::FromUnixMicros(manifest.saved_unix_micros()),
                             absl::UTCTimeZone())
          : "");
}

std::string Sizes(const proto::CheckpointTensor& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.sizes(), ", "), "]");
}

absl::StatusOr<CheckpointReader> Open(const std::string& dir) {
  return CheckpointReader::Open(dir, FileSystem::Real());
}

absl::Status List(const std::string& dir, std::ostream* out) {
  std::vector<std::string> folders = {dir};
  std::error_code error;
  std::filesystem::directory_iterator entries(dir, error);
  while (!error && entries != std::filesystem::directory_iterator()) {
    if (entries->is_directory(error)) folders.push_back(entries->path());
    entries.increment(error);
  }
  std::sort(folders.begin() + 1, folders.end());
  int found = 0;
  int damaged = 0;
  for (const std::string& folder : folders) {
    const absl::StatusOr<CheckpointReader> reader = Open(folder);
    if (absl::IsNotFound(reader.status())) continue;
    ++found;
    if (reader.ok()) {
      *out << Printable(folder) << ": " << Summary(reader->manifest()) << "\n";
      continue;
    }
    // The message begins with the path.
    *out << Printable(reader.status().message()) << "\n";
    ++damaged;
  }
  if (found == 0) {
    return absl::NotFoundError(
        absl::StrCat(dir, ": there is no checkpoint in it"));
  }
  if (damaged == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(dir, ": ", damaged, " of ", found,
                                          " checkpoints cannot be read"));
}

absl::Status Show(const std::string& dir, std::ostream* out) {
  TESSERA_ASSIGN_OR_RETURN(const CheckpointReader reader, Open(dir));
  const proto::CheckpointManifest& manifest = reader.manifest();
  *out << Summary(manifest) << "\n";
  for (const auto& storage : manifest.storages()) {
    std::vector<std::string> states;
    for (const auto& state : storage.states()) {
      states.push_back(absl::StrCat(state.name(), " ", state.dtype()));
    }
    for (int t = 0; t < storage.tensors_size(); ++t) {
      const auto& tensor = storage.tensors(t);
      *out << "  " << Printable(tensor.name()) << " " << Sizes(tensor)
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
  if (training.has_config()) {
    *out << Printable(training.config(), /*keep=*/"\n") << "\n";
  }
  return absl::OkStatus();
}

RewriteProgress ShownOn(ProgressLine* line) {
  return [line](int64_t done, int64_t of) { line->Show(done, of); };
}

absl::Status Verify(const std::string& dir, std::ostream* out,
                    std::ostream* err) {
  TESSERA_ASSIGN_OR_RETURN(
      CheckpointReader reader,
      CheckpointReader::OpenToStay(dir, FileSystem::Real()));
  {
    ProgressLine line(err);
    TESSERA_RETURN_IF_ERROR(reader.Verify(kThreads, ShownOn(&line)));
  }
  *out << Printable(dir) << ": whole; " << Summary(reader.manifest()) << "\n";
  return absl::OkStatus();
}

// ---- export, import, reshard ----

// Parses "--name=value" of args[3] on.
absl::StatusOr<std::map<std::string, std::string>> FlagsOf(
    const Args& args, const std::vector<std::string>& known) {
  std::map<std::string, std::string> flags;
  for (size_t i = 3; i < args.size(); ++i) {
    const std::pair<std::string, std::string> flag =
        absl::StrSplit(args[i], absl::MaxSplits('=', 1));
    if (std::find(known.begin(), known.end(), flag.first) == known.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", args[i], "': expected ",
                       absl::StrJoin(known, "=..., "), "=..."));
    }
    flags[flag.first] = flag.second;
  }
  return flags;
}

absl::Status Export(const Args& args, std::ostream* err) {
  TESSERA_ASSIGN_OR_RETURN(
      const auto flags,
      FlagsOf(args, {"--dtype", "--names", "--max_file_bytes"}));
  SafetensorsExportOptions options;
  for (const auto& [name, value] : flags) {
    if (name == "--names") {
      TESSERA_ASSIGN_OR_RETURN(options.names, NameMap::Load(value));
    } else if (name == "--max_file_bytes") {
      if (!absl::SimpleAtoi(value, &options.max_file_bytes)) {
        return absl::InvalidArgumentError(
            absl::StrCat(name, ": expected a number, got '", value, "'"));
      }
    } else {
      if (value != "fp32" && value != "bf16") {
        return absl::InvalidArgumentError(
            absl::StrCat(name, ": expected fp32 or bf16, got '", value, "'"));
      }
      options.dtype = value == "fp32" ? "F32" : "BF16";
    }
  }
  ProgressLine line(err);
  return ExportSafetensors(args[1], args[2], options, ShownOn(&line),
                           FileSystem::Real());
}

// Returns an error if there is a checkpoint: a conversion does not replace one.
absl::Status CheckHoldsNone(const std::string& path) {
  const absl::StatusOr<Folder> folder = Folder::Open(path, FileSystem::Real());
  if (!folder.ok() || absl::IsNotFound(ReadManifest(*folder).status())) {
    return absl::OkStatus();
  }
  return absl::AlreadyExistsError(absl::StrCat(
      path,
      ": holds a checkpoint already; name another folder, or remove it "
      "with 'tessera checkpoint rm'"));
}

// Removes the checkpoint, or what an interrupted save has left there.
absl::Status Remove(const std::string& path) {
  FileSystem* const files = FileSystem::Real();
  const absl::Status removed = RemoveCheckpoint(path, files);
  const absl::StatusOr<Folder> folder = Folder::Open(path, files);
  if (!absl::IsNotFound(removed) || !folder.ok()) return removed;
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                           folder->Names());
  const bool left = std::any_of(
      names.begin(), names.end(),
      [](const std::string& name) { return IdInName(name).has_value(); });
  return left ? RemoveUnfinished(path, files) : removed;
}

absl::Status Import(const Args& args, std::ostream* err) {
  TESSERA_RETURN_IF_ERROR(CheckHoldsNone(args[2]));
  TESSERA_ASSIGN_OR_RETURN(const auto flags, FlagsOf(args, {"--names"}));
  NameMap names;
  for (const auto& flag : flags) {
    TESSERA_ASSIGN_OR_RETURN(names, NameMap::Load(flag.second));
  }
  ProgressLine line(err);
  return ImportSafetensors(args[1], args[2], names, ShownOn(&line),
                           FileSystem::Real());
}

absl::Status ReshardTo(const Args& args, std::ostream* err) {
  TESSERA_ASSIGN_OR_RETURN(auto flags, FlagsOf(args, {"--files"}));
  int files = 0;
  if (!absl::SimpleAtoi(flags["--files"], &files)) {
    return absl::InvalidArgumentError("reshard: expected --files=N");
  }
  TESSERA_RETURN_IF_ERROR(CheckHoldsNone(args[2]));
  ProgressLine line(err);
  return ReshardCheckpoint(args[1], args[2], files, ShownOn(&line),
                           FileSystem::Real());
}

absl::Status Run(const Args& args, std::ostream* out, std::ostream* err,
                 bool* differ) try {
  const std::string& command = args[0];
  if (command == "ls") return List(args[1], out);
  if (command == "show") return Show(args[1], out);
  if (command == "verify") return Verify(args[1], out, err);
  if (command == "rm") return Remove(args[1]);
  if (command == "export") return Export(args, err);
  if (command == "import") return Import(args, err);
  if (command == "reshard") return ReshardTo(args, err);
  ProgressLine line(err);
  TESSERA_ASSIGN_OR_RETURN(const int differing,
                           DiffCheckpoints(args[1], args[2], ShownOn(&line),
                                           out, FileSystem::Real()));
  *differ = differing > 0;
  return absl::OkStatus();
} catch (const std::bad_alloc&) {
  return absl::ResourceExhaustedError(
      absl::StrCat(args[0], " ", args[1], ": no memory for it"));
}

bool IsCommand(const Args& args) {
  if (args.empty()) return false;
  for (const char* one : {"ls", "show", "verify", "rm"}) {
    if (args[0] == one) return args.size() == 2;
  }
  for (const char* one : {"export", "import", "reshard"}) {
    if (args[0] == one) return args.size() >= 3;
  }
  return args[0] == "diff" && args.size() == 3;
}

}  // namespace

int RunCheckpointCommand(const Args& args, std::ostream* out,
                         std::ostream* err) {
  if (!IsCommand(args)) {
    *err << kUsage;
    return 2;
  }
  bool differ = false;
  const absl::Status status = Run(args, out, err, &differ);
  if (!status.ok()) *err << Printable(status.ToString()) << "\n";
  return status.ok() && !differ ? 0 : 1;
}

}  // namespace tessera
