#include "checkpoint/format/step_folders.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

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

// Where a manifest says no time its step does, as far as it goes. What is none,
// or one of another format, is older than all.
void GuessTimes(std::vector<StepFolder>* found) {
  for (StepFolder& one : *found) {
    if (one.manifest.ok() || absl::IsFailedPrecondition(one.manifest)) continue;
    for (const StepFolder& other : *found) {
      if (!other.manifest.ok() || other.step > one.step) continue;
      one.saved_unix_micros =
          std::max(one.saved_unix_micros, other.saved_unix_micros);
    }
  }
}

// Of those `names` that hold a manifest, the one that was saved last first.
std::vector<StepFolder> NewestFirst(const std::string& dir,
                                    const std::vector<std::string>& names,
                                    FileSystem* files) {
  std::vector<StepFolder> found;
  for (const std::string& name : names) {
    const auto folder = Folder::Open(PathOf(dir, name), files);
    if (absl::IsNotFound(folder.status()) ||
        absl::IsFailedPrecondition(folder.status())) {
      continue;  // gone, or a file
    }
    StepFolder one;
    one.name = name;
    one.step = *StepOf(name);
    one.manifest = folder.status();
    if (folder.ok()) {
      const auto manifest = ReadManifest(*folder);
      if (absl::IsNotFound(manifest.status())) continue;
      one.manifest = manifest.status();
      if (manifest.ok()) one.saved_unix_micros = manifest->saved_unix_micros();
    }
    found.push_back(std::move(one));
  }
  GuessTimes(&found);
  std::sort(found.begin(), found.end(),
            [](const StepFolder& a, const StepFolder& b) {
              return std::tie(a.saved_unix_micros, a.step) >
                     std::tie(b.saved_unix_micros, b.step);
            });
  return found;
}

// Certainly none: an error that may pass is no answer.
bool HoldsNoManifest(const std::string& path, FileSystem* files) {
  const auto folder = Folder::Open(path, files);
  return folder.ok() &&
         absl::IsNotFound(folder->OpenFile(kManifestName).status());
}

// What became of a removal; another process that is busy there, or was faster,
// is no error.
absl::Status Removed(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsNotFound(status)
             ? absl::OkStatus()
             : status;
}

// Of `names`, none of which stays for ever.
absl::Status RemoveAllButTheLast(const std::string& dir,
                                 const std::vector<std::string>& names,
                                 const std::string& saved,
                                 const Retention& retention, FileSystem* files,
                                 FolderHolds holds) {
  absl::Status failed;
  int kept = 0;
  for (const StepFolder& one : NewestFirst(dir, names, files)) {
    const std::string path = PathOf(dir, one.name);
    absl::Status state = one.manifest;
    if (const auto known = retention.passed_over.find(one.name);
        known != retention.passed_over.end()) {
      state = known->second;
    } else if (state.ok() && kept < retention.keep_last) {
      state = CheckFilesOf(path, files, holds);
      if (state.ok()) {
        ++kept;
        continue;
      }
    }
    // Of those that are damaged only what is older than a good one goes.
    if (one.name == saved || kept == 0) continue;
    if (state.ok() || absl::IsDataLoss(state)) {
      failed.Update(Removed(RemoveCheckpoint(path, files)));
    } else if (kept == retention.keep_last) {
      failed.Update(Annotate(state, "not removed"));
    }
  }
  return failed;
}

}  // namespace

std::string StepFolderName(int64_t step) {
  return absl::StrFormat("%s%08d", kPrefix, step);
}

absl::StatusOr<std::vector<StepFolder>> ListStepFolders(const std::string& dir,
                                                        FileSystem* files) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                           StepNames(dir, files));
  return NewestFirst(dir, names, files);
}

absl::Status CheckFilesOf(const std::string& path, FileSystem* files,
                          FolderHolds holds) {
  TESSERA_ASSIGN_OR_RETURN(const Folder folder, Folder::Open(path, files));
  TESSERA_ASSIGN_OR_RETURN(const proto::CheckpointManifest manifest,
                           ReadManifest(folder));
  bool any = false;
  for (int r = 0; r < manifest.files_size(); ++r) {
    const auto file = folder.OpenFile(DataFileName(manifest.id(), r));
    if (absl::IsNotFound(file.status())) {
      if (holds == FolderHolds::kPart) continue;
      return absl::DataLossError(file.status().message());
    }
    TESSERA_RETURN_IF_ERROR(file.status());
    if (file->bytes() != manifest.files(r).bytes()) {
      return absl::DataLossError(
          absl::StrCat(file->path(), ": has ", file->bytes(),
                       " bytes, expected ", manifest.files(r).bytes()));
    }
    any = true;
  }
  return any ? absl::OkStatus()
             : absl::DataLossError(absl::StrCat(path, ": has no data file"));
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
  TESSERA_RETURN_IF_ERROR(folder.Rename(kNewLatest, kLatestName));
  return folder.Sync();
}

absl::Status RemoveOldSteps(const std::string& dir, const std::string& saved,
                            const Retention& retention, FileSystem* files,
                            FolderHolds holds) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                           StepNames(dir, files));
  // With many of those that stay for ever no save has to read them all.
  std::vector<std::string> others;
  for (const std::string& name : names) {
    if (retention.keep_every == 0 || *StepOf(name) % retention.keep_every != 0)
      others.push_back(name);
  }
  absl::Status failed =
      RemoveAllButTheLast(dir, others, saved, retention, files, holds);
  for (const std::string& name : names) {
    const std::string path = PathOf(dir, name);
    if (name == saved || !HoldsNoManifest(path, files)) continue;
    failed.Update(Removed(RemoveUnfinished(path, files)));
  }
  return failed;
}

}  // namespace tessera
