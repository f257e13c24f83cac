#include "checkpoint/exchange/command.h"

#include <cstdint>
#include <filesystem>
#include <new>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/json.h"
#include "base/status.h"
#include "checkpoint/exchange/diff.h"
#include "checkpoint/exchange/listing.h"
#include "checkpoint/exchange/rewrite.h"
#include "checkpoint/exchange/terminal.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/checkpoint_reader.h"

namespace tessera {
namespace {

constexpr int kVerifyThreads = 4;  // threads that verify
constexpr int kMostFiles = 100'000;
constexpr char kNewest[] =
    "A folder of checkpoints stands for its newest readable one.";
constexpr size_t kMostLines = 20;  // of differences
// The keys that SummaryMembers (listing.cc) writes, for the help of --json.
constexpr char kSummaryKeys[] =
    "path, step, samples, parameters, bytes, files, stage, world_size, saved";

RewriteProgress ShownOn(ProgressLine* line) {
  return [line](int64_t done, int64_t of) { line->Show(done, of); };
}

// Ends a command: errors name what files are called, and a terminal must not
// obey that.
int EndOf(CommandCall* call, const absl::Status& status) {
  if (status.ok()) return 0;
  return call->Failed(absl::Status(status.code(), Printable(status.message())));
}

// Returns the checkpoint that the argument means, and tells which.
std::string CheckpointOf(CommandCall* call, size_t argument) {
  const std::string& given = call->words()[argument];
  std::string path = CheckpointAt(given);
  if (path != given && !call->Has("--quiet") && !call->Has("--json")) {
    call->err() << Printable(given)
                << " stands for its newest readable "
                   "checkpoint, "
                << Printable(path) << "\n";
  }
  return path;
}

absl::Status Verify(const std::string& dir, CommandCall* call) {
  TESSERA_ASSIGN_OR_RETURN(
      CheckpointReader reader,
      CheckpointReader::OpenToStay(dir, FileSystem::Real()));
  {
    ProgressLine line(call->progress());
    TESSERA_RETURN_IF_ERROR(reader.Verify(kVerifyThreads, ShownOn(&line)));
  }
  if (call->Has("--quiet")) return absl::OkStatus();
  if (call->Has("--json")) {
    call->out() << "{" << SummaryMembers(dir, reader.manifest())
                << ", \"whole\": true}\n";
  } else {
    call->out() << Printable(dir) << ": whole; "
                << SummaryLine(reader.manifest()) << "\n";
  }
  return absl::OkStatus();
}

absl::StatusOr<int> Diff(CommandCall* call) {
  const std::string a = CheckpointOf(call, 0), b = CheckpointOf(call, 1);
  ProgressLine line(call->progress());
  std::ostringstream text;
  const bool quiet = call->Has("--quiet"), json = call->Has("--json");
  DiffOptions options;
  options.progress = ShownOn(&line);
  options.together = !json && !call->Has("--all");
  if (options.together) options.most_lines = kMostLines;
  TESSERA_ASSIGN_OR_RETURN(
      const int differing,
      DiffCheckpoints(a, b, options, quiet || json ? &text : &call->out(),
                      FileSystem::Real()));
  if (json && !quiet) {
    std::vector<std::string> lines =
        absl::StrSplit(text.str(), '\n', absl::SkipEmpty());
    for (std::string& each : lines) each = QuoteJson(each);
    call->out() << "{\"differences\": " << differing << ", \"lines\": ["
                << absl::StrJoin(lines, ",\n  ") << "]}\n";
  }
  return differing > 0 ? 1 : 0;
}

// ---- export, import, reshard ----

absl::StatusOr<SafetensorsExportOptions> ExportOptionsOf(
    const CommandCall& call, int64_t max_file_bytes) {
  SafetensorsExportOptions options;
  options.max_file_bytes = max_file_bytes;
  if (call.Has("--names")) {
    TESSERA_ASSIGN_OR_RETURN(options.names, NameMap::Load(call.Get("--names")));
  }
  if (call.Has("--dtype")) {
    options.dtype = call.Get("--dtype") == "fp32" ? "F32" : "BF16";
  }
  return options;
}

// Tells what a conversion has left in `folder`.
absl::Status TellMade(const std::string& folder, CommandCall* call) {
  if (call->Has("--quiet")) return absl::OkStatus();
  int64_t bytes = 0, files = 0;
  std::error_code error;
  for (std::filesystem::directory_iterator each(folder, error), end;
       !error && each != end; each.increment(error)) {
    if (!each->is_regular_file(error)) continue;
    bytes += static_cast<int64_t>(each->file_size(error));
    ++files;
  }
  call->out() << Printable(folder) << ": " << files
              << (files == 1 ? " file, " : " files in all, ") << SizeText(bytes)
              << "\n";
  return absl::OkStatus();
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

absl::Status Import(CommandCall* call) {
  const std::string &from = call->words()[0], &to = call->words()[1];
  TESSERA_RETURN_IF_ERROR(CheckHoldsNone(to));
  NameMap names;
  if (call->Has("--names")) {
    TESSERA_ASSIGN_OR_RETURN(names, NameMap::Load(call->Get("--names")));
  }
  {
    ProgressLine line(call->progress());
    TESSERA_RETURN_IF_ERROR(
        ImportSafetensors(from, to, names, ShownOn(&line), FileSystem::Real()));
  }
  return TellMade(to, call);
}

absl::Status Reshard(int files, CommandCall* call) {
  const std::string from = CheckpointOf(call, 0), &to = call->words()[1];
  TESSERA_RETURN_IF_ERROR(CheckHoldsNone(to));
  const auto folder = Folder::Open(from, FileSystem::Real());
  TESSERA_RETURN_IF_ERROR(folder.status());
  TESSERA_ASSIGN_OR_RETURN(const proto::CheckpointManifest manifest,
                           ReadManifest(*folder));
  {
    ProgressLine line(call->progress());
    TESSERA_RETURN_IF_ERROR(
        ReshardCheckpoint(from, to, files, ShownOn(&line), FileSystem::Real()));
  }
  if (files < manifest.files_size()) {
    call->err() << "note: client states and generators of ranks " << files
                << " to " << manifest.files_size() - 1
                << " have no file, so they are left out\n";
  }
  return TellMade(to, call);
}

// ---- the commands

int RunList(CommandCall* call) {
  return EndOf(call, ListCheckpoints(call->words()[0], call->Has("--json"),
                                     &call->out()));
}

int RunShow(CommandCall* call) {
  return EndOf(call, ShowCheckpoint(CheckpointOf(call, 0), call->Has("--json"),
                                    call->Has("--config"), &call->out()));
}

int RunVerify(CommandCall* call) {
  return EndOf(call, Verify(CheckpointOf(call, 0), call));
}

int RunDiff(CommandCall* call) {
  const absl::StatusOr<int> differ = Diff(call);
  if (differ.ok()) return *differ;
  (void)EndOf(call, differ.status());
  return 2;
}

int RunRemove(CommandCall* call) {
  const std::string& dir = call->words()[0];
  FileSystem* const files = FileSystem::Real();
  const absl::StatusOr<Removable> found = FindRemovable(dir, files);
  if (!found.ok()) return EndOf(call, found.status());
  const std::string what = absl::StrCat(Printable(dir), ": ", found->text);
  if (!call->Has("--yes")) {
    const std::optional<bool> sure =
        call->Confirm(absl::StrCat(what, "\nRemove it?"));
    if (!sure.has_value()) {
      return call->Misused(absl::StrCat(
          what, "; there is no terminal to ask on: --yes removes it"));
    }
    if (!*sure) {
      call->err() << "nothing is removed\n";
      return 1;
    }
  }
  const absl::Status removed = found->unfinished ? RemoveUnfinished(dir, files)
                                                 : RemoveCheckpoint(dir, files);
  if (removed.ok() && !call->Has("--quiet")) {
    call->out() << what << "; removed\n";
  }
  return EndOf(call, removed);
}

int RunExport(CommandCall* call) {
  const std::string dtype = call->Get("--dtype", "fp32");
  if (dtype != "fp32" && dtype != "bf16") {
    return call->Misused(
        absl::StrCat("--dtype: expected fp32 or bf16, got '", dtype, "'"));
  }
  int64_t max_file_bytes = SafetensorsExportOptions().max_file_bytes;
  if (!call->ReadNumber("--max_file_bytes", 1, &max_file_bytes)) return 2;
  const auto run = [&]() -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const SafetensorsExportOptions options,
                             ExportOptionsOf(*call, max_file_bytes));
    const std::string from = CheckpointOf(call, 0);
    {
      ProgressLine line(call->progress());
      TESSERA_RETURN_IF_ERROR(ExportSafetensors(
          from, call->words()[1], options, ShownOn(&line), FileSystem::Real()));
    }
    return TellMade(call->words()[1], call);
  };
  return EndOf(call, run());
}

int RunImport(CommandCall* call) { return EndOf(call, Import(call)); }

int RunReshard(CommandCall* call) {
  int64_t files = 0;
  if (!call->ReadNumber("--files", 1, &files)) return 2;
  if (files == 0 || files > kMostFiles) {
    return call->Misused(
        absl::StrCat("expected --files N, of 1 to ", kMostFiles));
  }
  return EndOf(call, Reshard(static_cast<int>(files), call));
}

// Runs a command that may need more memory than there is.
template <int (*kRun)(CommandCall*)>
int Run(CommandCall* call) try {
  return kRun(call);
} catch (const std::bad_alloc&) {
  return EndOf(call, absl::ResourceExhaustedError(
                         absl::StrCat(call->words()[0], ": no memory for it")));
}

}  // namespace

std::vector<Command> CheckpointCommands() {
  const CommandFlag quiet = {"--quiet", "", "Prints nothing on success."};
  const CommandFlag names = {
      "--names", "gpt2|FILE",
      "Rules that rename tensors: those of transformers' GPT-2, or from a file "
      "(docs/guide.md)."};
  return {
      {"checkpoint ls",
       "DIR",
       "Lists the checkpoints in DIR and below it, to the third level.",
       "",
       {{"--json", "",
         absl::StrCat("Prints JSON: [{", kSummaryKeys,
                      "}], and {path, error} of one that cannot be read.")}},
       {"checkpoint ls run7", "checkpoint ls run7 --json"},
       Run<RunList>},
      {"checkpoint show",
       "DIR",
       "Shows a checkpoint's tensors, states and files, and its training.",
       kNewest,
       {{"--config", "", "Shows the run's configuration, too."},
        {"--json", "",
         absl::StrCat("Prints JSON: {", kSummaryKeys,
                      ", tensors}, and config with --config.")}},
       {"checkpoint show run7/step-00000120"},
       Run<RunShow>},
      {"checkpoint verify",
       "DIR",
       "Reads a whole checkpoint and verifies every checksum.",
       kNewest,
       {{"--json", "",
         absl::StrCat("Prints JSON: {", kSummaryKeys, ", whole}.")},
        quiet},
       {"checkpoint verify run7/step-00000120"},
       Run<RunVerify>},
      {"checkpoint diff",
       "A B",
       "Lists the differences between two checkpoints, and how large they are.",
       "Differences of one kind share a line, and the first 20 lines are "
       "shown. How a run was sharded, its configuration and libtorch's version "
       "are not compared. The exit status is 1 if they differ, and 2 if one "
       "cannot be read. A folder of checkpoints stands for its newest "
       "readable one.",
       {{"--all", "", "Has a line for each difference."},
        {"--json", "", "Prints JSON: {differences, lines}."},
        {"--quiet", "", "Prints nothing."}},
       {"checkpoint diff run7/step-00000120 run8/step-00000120"},
       Run<RunDiff>},
      {"checkpoint rm",
       "DIR",
       "Removes a checkpoint, and no other file.",
       "It tells its step and size, and asks. Where there is no terminal to "
       "ask on, it removes nothing without --yes.",
       {{"--yes", "", "Removes it without asking."}, quiet},
       {"checkpoint rm run7/step-00000060",
        "checkpoint rm run7/step-00000060 --yes --quiet"},
       Run<RunRemove>},
      {"checkpoint export",
       "DIR OUT",
       "Writes values as safetensors files, as Hugging Face's libraries read "
       "them.",
       kNewest,
       {{"--dtype", "fp32|bf16",
         "Dtype of floating-point values; default: their own."},
        names,
        {"--max_file_bytes", "N", "Maximum size of a file in bytes."},
        quiet},
       {"checkpoint export run7/step-00000120 out --dtype bf16"},
       Run<RunExport>},
      {"checkpoint import",
       "FILES OUT",
       "Makes a checkpoint from the values in safetensors files.",
       "A program loads it with LoadCheckpointOptions::model_only.",
       {names, quiet},
       {"checkpoint import gpt2/model.safetensors start --names gpt2"},
       Run<RunImport>},
      {"checkpoint reshard",
       "DIR OUT",
       "Writes a checkpoint in N files.",
       "Loading does not need this: any number of ranks loads any number of "
       "files. A file holds the client state and the generators of its rank: "
       "with fewer files those of further ranks are left out.",
       {{"--files", "N", "The number of files."}, quiet},
       {"checkpoint reshard run7/step-00000120 one --files 1"},
       Run<RunReshard>},
  };
}

}  // namespace tessera
