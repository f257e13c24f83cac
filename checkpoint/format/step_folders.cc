#include "checkpoint/format/step_folders.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/step_name.h"

namespace tessera {
namespace {

// Whether it stays for ever.
bool Stays(const std::string& name, const Retention& retention) {
  return retention.keep.count(name) > 0 ||
         (retention.keep_every != 0 &&
          *StepInName(name) % retention.keep_every == 0);
}

std::string PathOf(const std::string& dir, const std::string& name) {
  return absl::StrCat(dir, "/", name);
}

absl::StatusOr<std::vector<std::string>> StepNames(const std::string& dir,
                                                   FileSystem* files) {
  const auto folder = Folder::Open(dir, files);
  if (absl::IsNotFound(folder.status())) return std::vector<std::string>();
  TESSERA_RETURN_IF_ERROR(folder.status());
  TESSERA_ASSIGN_OR_RETURN(std::vector<std::string> names, folder->Names());
  names.erase(
      std::remove_if(names.begin(), names.end(),
                     [](const std::string& name) { return !StepInName(name); }),
      names.end());
  return names;
}

// Where a manifest has no time, guesses one from its step.
void GuessTimes(std::vector<StepFolder>* found) {
  for (StepFolder& one : *found) {
    if (one.manifest.ok()) continue;
    for (const StepFolder& other : *found) {
      if (!other.manifest.ok() || other.step > one.step) continue;
      one.saved_unix_micros =
          std::max(one.saved_unix_micros, other.saved_unix_micros);
    }
  }
}

// Returns those of `names` that hold a manifest, the last saved one first.
std::vector<StepFolder> NewestFirst(const std::string& dir,
                                    const std::vector<std::string>& names,
                                    FileSystem* files) {
  std::vector<StepFolder> found;
  for (const std::string& name : names) {
    const auto folder = Folder::Open(PathOf(dir, name), files);
    if (absl::IsNotFound(folder.status())) continue;  // gone
    StepFolder one;
    one.name = name;
    one.step = *StepInName(name);
    one.manifest = folder.status();
    if (absl::IsFailedPrecondition(folder.status())) {
      one.is_file = true;
      one.manifest = absl::DataLossError(folder.status().message());
    }
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

// Returns whether there is certainly no manifest: an error that may pass does
// not say so.
bool HoldsNoManifest(const std::string& path, FileSystem* files) {
  const auto folder = Folder::Open(path, files);
  return folder.ok() &&
         absl::IsNotFound(folder->OpenFile(kManifestName).status());
}

// Returns the result of a removal; it is no error if another process is busy
// there, or was faster.
absl::Status Removed(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsNotFound(status)
             ? absl::OkStatus()
             : status;
}

// `names` has no step that stays for ever.
absl::Status RemoveAllButTheLast(const std::string& dir,
                                 const std::vector<std::string>& names,
                                 const std::string& saved,
                                 const Retention& retention, FileSystem* files,
                                 FolderHolds holds,
                                 std::vector<std::string>* removed) {
  absl::Status failed;
  int kept = 0;
  for (const StepFolder& one : NewestFirst(dir, names, files)) {
    if (one.is_file) continue;  // perhaps a user's own
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
    // A damaged one is removed only if it is older than a good one.
    if (one.name == saved || kept == 0) continue;
    if (state.ok() || absl::IsDataLoss(state)) {
      const absl::Status gone = RemoveCheckpoint(path, files);
      failed.Update(Removed(gone));
      if (gone.ok() && state.ok() && removed != nullptr) {
        removed->push_back(one.name);
      }
    } else if (kept == retention.keep_last) {
      failed.Update(Annotate(state, "not removed"));
    }
  }
  return failed;
}

}  // namespace

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
    if (absl::IsFailedPrecondition(file.status())) {  // no file
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

namespace {

// Replaces the text of DIR/`file` by `name`.
absl::Status WriteName(const std::string& dir, const std::string& file_name,
                       const std::string& name, FileSystem* files) {
  const std::string fresh = absl::StrCat(file_name, ".new");
  TESSERA_ASSIGN_OR_RETURN(const Folder folder, Folder::Open(dir, files));
  TESSERA_RETURN_IF_ERROR(folder.Remove(fresh));
  {
    TESSERA_ASSIGN_OR_RETURN(const File file, folder.CreateFile(fresh));
    TESSERA_RETURN_IF_ERROR(file.WriteAt(0, absl::StrCat(name, "\n")));
    TESSERA_RETURN_IF_ERROR(file.Sync());
  }
  TESSERA_RETURN_IF_ERROR(folder.Rename(fresh, file_name));
  return folder.Sync();
}

}  // namespace

absl::Status WriteLatest(const std::string& dir, const std::string& name,
                         FileSystem* files) {
  return WriteName(dir, kLatestName, name, files);
}

absl::Status WriteBest(const std::string& dir, const std::string& name,
                       FileSystem* files) {
  return WriteName(dir, kBestName, name, files);
}

absl::Status RemoveOldSteps(const std::string& dir, const std::string& saved,
                            const Retention& retention, FileSystem* files,
                            FolderHolds holds,
                            std::vector<std::string>* removed) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                           StepNames(dir, files));
  // With many steps that stay for ever, a save need not read them all.
  std::vector<std::string> others;
  for (const std::string& name : names) {
    if (!Stays(name, retention)) others.push_back(name);
  }
  absl::Status failed =
      RemoveAllButTheLast(dir, others, saved, retention, files, holds, removed);
  for (const std::string& name : names) {
    const std::string path = PathOf(dir, name);
    if (name == saved || !HoldsNoManifest(path, files)) continue;
    failed.Update(Removed(RemoveUnfinished(path, files)));
  }
  return failed;
}

namespace {

// Returns the bytes of the files that `path` has of its checkpoint, and some
// for the file system's own; 0: not known.
int64_t BytesOfCheckpoint(const std::string& path, FileSystem* files) {
  const auto folder = Folder::Open(path, files);
  if (!folder.ok()) return 0;
  const auto manifest = ReadManifest(*folder);
  if (!manifest.ok()) return 0;
  int64_t bytes = manifest->ByteSizeLong();
  for (int r = 0; r < manifest->files_size(); ++r) {
    const auto file = folder->OpenFile(DataFileName(manifest->id(), r));
    if (file.ok()) bytes += file->bytes();
  }
  return bytes + bytes / 64;
}

// Returns what may go to make room, in this order: damaged ones, then the first
// saved ones.
std::vector<std::string> MayGo(const std::string& dir, const std::string& good,
                               const Retention& retention, FileSystem* files,
                               FolderHolds holds) {
  auto names = StepNames(dir, files);
  if (!names.ok()) return {};
  names->erase(std::remove_if(names->begin(), names->end(),
                              [&](const std::string& name) {
                                return name != good && Stays(name, retention);
                              }),
               names->end());
  std::vector<std::string> damaged, older;
  bool any = false;
  for (const StepFolder& one : NewestFirst(dir, *names, files)) {
    if (one.is_file) continue;
    const auto known = retention.passed_over.find(one.name);
    const absl::Status state =
        known != retention.passed_over.end()
            ? known->second
            : CheckFilesOf(PathOf(dir, one.name), files, holds);
    const bool newest = state.ok() && !std::exchange(any, any || state.ok());
    if (one.name == good || newest) continue;
    if (absl::IsDataLoss(state)) damaged.push_back(one.name);
    if (state.ok()) older.push_back(one.name);
  }
  std::reverse(older.begin(), older.end());
  damaged.insert(damaged.end(), older.begin(), older.end());
  return damaged;
}

}  // namespace

DiskRoom MakeRoom(const std::string& dir, const std::string& good,
                  const Retention& retention, int least, FileSystem* files,
                  FolderHolds holds) {
  DiskRoom room;
  if (!good.empty()) {
    room.needed_bytes = BytesOfCheckpoint(PathOf(dir, good), files);
  }
  const auto lacks = [&] {
    const auto folder = Folder::Open(dir, files);
    room.free_bytes = folder.ok() ? folder->FreeBytes().value_or(-1) : -1;
    return room.free_bytes >= 0 && room.free_bytes < room.needed_bytes;
  };
  if (least <= 0 && (!lacks() || least < 0)) return room;
  (void)RemoveOldSteps(dir, good, retention, files, holds);
  if ((!lacks() && least == 0) || good.empty() ||
      !CheckFilesOf(PathOf(dir, good), files, holds).ok()) {
    return room;
  }
  for (const std::string& name : MayGo(dir, good, retention, files, holds)) {
    if (static_cast<int>(room.removed.size()) >= least && !lacks()) break;
    if (RemoveCheckpoint(PathOf(dir, name), files).ok()) {
      room.removed.push_back(name);
    }
  }
  (void)lacks();
  return room;
}

}  // namespace tessera
