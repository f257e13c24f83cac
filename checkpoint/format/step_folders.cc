#include "checkpoint/format/step_folders.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "checkpoint/format/checkpoint_folder.h"

namespace tessera {
namespace {

constexpr char kPrefix[] = "step-";
constexpr char kLatest[] = "latest";
constexpr char kNewLatest[] = "latest.new";

std::string PathOf(const std::string& dir, const std::string& name) {
  return absl::StrCat(dir, "/", name);
}

// Of StepFolderName's alone: "step-12" is a user's own.
std::optional<int64_t> StepOf(const std::string& name) {
  absl::string_view digits = name;
  int64_t step = 0;
  if (!absl::ConsumePrefix(&digits, kPrefix) ||
      !std::all_of(digits.begin(), digits.end(), absl::ascii_isdigit) ||
      !absl::SimpleAtoi(digits, &step) || StepFolderName(step) != name) {
    return std::nullopt;
  }
  return step;
}

bool IsWhole(const Folder& folder, const proto::CheckpointManifest& manifest,
             FolderHolds holds) {
  bool any = false;
  for (int r = 0; r < manifest.files_size(); ++r) {
    const auto file = folder.OpenFile(DataFileName(manifest.id(), r));
    if (holds == FolderHolds::kPart && absl::IsNotFound(file.status())) {
      continue;
    }
    if (!file.ok() || file->bytes() != manifest.files(r).bytes()) return false;
    any = true;
  }
  return any;
}

absl::StatusOr<std::vector<std::string>> StepNames(const std::string& dir,
                                                   FileSystem* files) {
  const auto folder = Folder::Open(dir, files);
  if (absl::IsNotFound(folder.status())) return std::vector<std::string>();
  TESSERA_RETURN_IF_ERROR(folder.status());
  TESSERA_ASSIGN_OR_RETURN(std::vector<std::string> names, folder->Names());
  names.erase(
      std::remove_if(names.begin(), names.end(),
                     [](const std::string& name) { return !StepOf(name); }),
      names.end());
  return names;
}

}  // namespace

std::string StepFolderName(int64_t step) {
  return absl::StrFormat("%s%08d", kPrefix, step);
}

absl::StatusOr<std::vector<StepFolder>> ListStepFolders(const std::string& dir,
                                                        FileSystem* files,
                                                        FolderHolds holds) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                           StepNames(dir, files));
  std::vector<StepFolder> found;
  for (const std::string& name : names) {
    const auto folder = Folder::Open(PathOf(dir, name), files);
    if (!folder.ok()) continue;
    const auto manifest = ReadManifest(*folder);
    if (absl::IsNotFound(manifest.status())) continue;
    StepFolder one;
    one.name = name;
    one.step = *StepOf(name);
    if (manifest.ok()) {
      one.saved_unix_micros = manifest->saved_unix_micros();
      one.whole = IsWhole(*folder, *manifest, holds);
    }
    found.push_back(std::move(one));
  }
  std::sort(found.begin(), found.end(),
            [](const StepFolder& a, const StepFolder& b) {
              return std::tie(a.saved_unix_micros, a.step) >
                     std::tie(b.saved_unix_micros, b.step);
            });
  return found;
}

absl::Status WriteLatest(const std::string& dir, const std::string& name,
                         FileSystem* files) {
  TESSERA_ASSIGN_OR_RETURN(const Folder folder, Folder::Open(dir, files));
  TESSERA_RETURN_IF_ERROR(folder.Remove(kNewLatest));
  {
    TESSERA_ASSIGN_OR_RETURN(const File file, folder.CreateFile(kNewLatest));
    TESSERA_RETURN_IF_ERROR(file.WriteAt(0, absl::StrCat(name, "\n")));
    TESSERA_RETURN_IF_ERROR(file.Sync());
  }
  TESSERA_RETURN_IF_ERROR(folder.Rename(kNewLatest, kLatest));
  return folder.Sync();
}

absl::Status RemoveOldSteps(const std::string& dir, const std::string& saved,
                            const Retention& retention, FileSystem* files,
                            FolderHolds holds) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<StepFolder> found,
                           ListStepFolders(dir, files, holds));
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                           StepNames(dir, files));
  absl::Status failed;
  const auto note = [&](const absl::Status& status) {
    // Of another process that is busy there, or was faster.
    if (!absl::IsUnavailable(status) && !absl::IsNotFound(status)) {
      failed.Update(status);
    }
  };
  int kept = 0;
  for (const StepFolder& one : found) {
    const bool newest = one.whole && kept < retention.keep_last;
    kept += newest ? 1 : 0;
    if (newest || one.name == saved ||
        (retention.keep_every > 0 && one.step % retention.keep_every == 0)) {
      continue;
    }
    // Of those that are damaged only what is older than a good one goes.
    if (kept == 0) continue;
    note(RemoveCheckpoint(PathOf(dir, one.name), files));
  }
  for (const std::string& name : names) {
    const bool full =
        std::any_of(found.begin(), found.end(),
                    [&](const StepFolder& one) { return one.name == name; });
    if (full || name == saved) continue;
    note(RemoveUnfinished(PathOf(dir, name), files));
  }
  return failed;
}

}  // namespace tessera
