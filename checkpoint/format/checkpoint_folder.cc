#include "checkpoint/format/checkpoint_folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/log.h"
#include "base/status.h"
#include "checkpoint/format/step_name.h"

namespace tessera {
namespace {

constexpr int64_t kMaxManifestBytes = int64_t{2} << 30;

uint64_t RandomId() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

// Removes the files of all saves except `kept`, as many as it can.
absl::Status Sweep(const Folder& folder, std::optional<uint64_t> kept) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                           folder.Names());
  absl::Status failed;
  for (const std::string& name : names) {
    const std::optional<uint64_t> id = IdInName(name);
    if (!id.has_value() || id == kept) continue;
    failed.Update(folder.Clear(name));
  }
  return failed;
}

// Returns whether the folder's "manifest" is a checkpoint's, even if damaged.
bool IsOurs(const Folder& folder) {
  if (StepInPath(folder.path()).has_value()) return true;
  const absl::StatusOr<std::vector<std::string>> names = folder.Names();
  return names.ok() &&
         std::any_of(names->begin(), names->end(), [](const std::string& name) {
           return IdInName(name).has_value();
         });
}

// Returns the error for something that has a manifest's name and is none.
absl::Status NoManifest(const Folder& folder, const absl::Status& why) {
  if (!IsOurs(folder)) return why;
  return absl::DataLossError(absl::StrCat(
      why.message(), ", so the checkpoint that it was of is lost"));
}

// Says where the newest checkpoint is, for users who name the folder of a run's
// checkpoints.
std::string NewestOf(const Folder& folder) {
  constexpr int64_t kMaxNameBytes = 256;
  const absl::StatusOr<File> file = folder.OpenFile(kLatestName);
  if (!file.ok() || file->bytes() > kMaxNameBytes) return "";
  std::string name(static_cast<size_t>(file->bytes()), '\0');
  if (!file->ReadAt(0, name.data(), file->bytes()).ok()) return "";
  absl::StripTrailingAsciiWhitespace(&name);
  const std::string path = absl::StrCat(folder.path(), "/", name);
  const absl::StatusOr<Folder> newest = Folder::Open(path, folder.files());
  // DeepSpeed's folders have such a file, too.
  if (!newest.ok() || !newest->OpenFile(kManifestName).ok()) return "";
  return absl::StrCat("; the newest of those in it is ", path);
}

}  // namespace

absl::StatusOr<proto::CheckpointManifest> ReadManifest(const Folder& folder) {
  absl::StatusOr<File> file = folder.OpenFile(kManifestName);
  if (absl::IsNotFound(file.status())) {
    return absl::NotFoundError(
        absl::StrCat(folder.path(), ": holds no checkpoint (it has no file '",
                     kManifestName, "')", NewestOf(folder)));
  }
  if (absl::IsFailedPrecondition(file.status())) {
    return NoManifest(folder, file.status());
  }
  TESSERA_RETURN_IF_ERROR(file.status());
  if (file->bytes() > kMaxManifestBytes) {
    return absl::DataLossError(absl::StrCat(
        file->path(), ": has ", file->bytes(), " bytes, which none has"));
  }
  std::string bytes(static_cast<size_t>(file->bytes()), '\0');
  TESSERA_RETURN_IF_ERROR(file->ReadAt(0, bytes.data(), file->bytes()));
  absl::StatusOr<proto::CheckpointManifest> manifest =
      DecodeManifest(bytes, file->path());
  return BeginsAsManifest(bytes) ? std::move(manifest)
                                 : NoManifest(folder, manifest.status());
}

namespace {

// Takes the lock of `folder`, which lasts until the file is closed.
absl::StatusOr<File> Lock(const Folder& folder) {
  absl::StatusOr<File> lock = folder.OpenOrCreateFile(kLockName);
  if (absl::IsFailedPrecondition(lock.status()) && IsOurs(folder)) {
    TESSERA_LOG(WARNING) << lock.status().message() << "; it is replaced";
    TESSERA_RETURN_IF_ERROR(folder.Clear(kLockName));
    lock = folder.OpenOrCreateFile(kLockName);
  }
  TESSERA_RETURN_IF_ERROR(lock.status());
  const absl::Status locked = lock->Lock();
  if (locked.ok()) return lock;
  if (!absl::IsAlreadyExists(locked)) {
    return Annotate(locked, "the folder cannot be locked");
  }
  return absl::UnavailableError(absl::StrCat(
      folder.path(),
      ": another process is saving a checkpoint there, or removing it; give "
      "each job a folder of its own, or wait until it has ended"));
}

}  // namespace

// Opens and locks the folder. A run must get past a step whose name is taken by
// something else: a file, or a link to nothing.
absl::StatusOr<Saving> Saving::Locked(const std::string& path,
                                      FileSystem* files) {
  const bool made = absl::IsNotFound(Folder::Open(path, files).status());
  absl::StatusOr<Folder> folder = Folder::Make(path, files);
  if ((absl::IsFailedPrecondition(folder.status()) ||
       absl::IsNotFound(folder.status())) &&
      StepInPath(path).has_value()) {
    const std::string aside =
        absl::StrFormat("%s.aside-%016x", path, RandomId());
    if (Uninterrupted([&] { return files->Rename(AT_FDCWD, path, aside); }) ==
        0) {
      TESSERA_LOG(WARNING) << path << ": is not a folder; renamed to " << aside;
      folder = Folder::Make(path, files);
    }
  }
  TESSERA_RETURN_IF_ERROR(folder.status());
  TESSERA_ASSIGN_OR_RETURN(File lock, Lock(*folder));
  Saving saving(*std::move(folder), std::move(lock), RandomId());
  saving.made_ = made;
  return saving;
}

absl::StatusOr<Saving> Saving::Begin(const std::string& path,
                                     FileSystem* files) {
  TESSERA_ASSIGN_OR_RETURN(Saving saving, Locked(path, files));
  const Folder& folder = saving.folder_;
  // Nothing is swept where the manifest cannot be read: its files may be all
  // that is left of a checkpoint. Something that is no manifest at all is not
  // replaced.
  const absl::StatusOr<proto::CheckpointManifest> there = ReadManifest(folder);
  if (absl::IsFailedPrecondition(there.status())) {
    return Annotate(there.status(), "nothing is saved over it");
  }
  if (there.ok() || absl::IsNotFound(there.status())) {
    // What cannot be removed now is left to the next save.
    (void)Sweep(folder, there.ok() ? std::optional<uint64_t>(there->id())
                                   : std::nullopt);
  }
  return saving;
}

absl::StatusOr<Saving> Saving::BeginPart(const std::string& path, bool replace,
                                         FileSystem* files) {
  TESSERA_ASSIGN_OR_RETURN(Saving saving, Locked(path, files));
  const absl::Status there = ReadManifest(saving.folder_).status();
  if (replace || absl::IsNotFound(there)) return saving;
  if (!there.ok() && !absl::IsDataLoss(there)) return there;
  // No rename commits in several folders at once.
  return absl::FailedPreconditionError(absl::StrCat(
      path,
      ": holds a checkpoint; with checkpoint.use_node_local_storage none can "
      "take its place, so save to another folder each time, as "
      "CheckpointManager does"));
}

absl::Status Saving::ClearPart() {
  TESSERA_RETURN_IF_ERROR(folder_.Clear(kManifestName));
  TESSERA_RETURN_IF_ERROR(folder_.Sync());
  return Sweep(folder_, id_);
}

absl::Status Saving::CheckFiles(
    const proto::CheckpointManifest& manifest) const {
  std::vector<int> all(static_cast<size_t>(manifest.files_size()));
  std::iota(all.begin(), all.end(), 0);
  for (int r : ranks_.value_or(all)) {
    const absl::StatusOr<File> file = folder_.OpenFile(DataFileName(id_, r));
    if (absl::IsNotFound(file.status())) {
      return absl::FailedPreconditionError(absl::StrCat(
          file.status().message(), ", though rank ", r, " has written it",
          ranks_.has_value() ? ""
                             : ": is the folder on a disk of each host's own "
                               "(checkpoint.use_node_local_storage)?"));
    }
    TESSERA_RETURN_IF_ERROR(file.status());
    if (file->bytes() != manifest.files(r).bytes()) {
      return absl::DataLossError(
          absl::StrCat(file->path(), ": has ", file->bytes(), " bytes; rank ",
                       r, " has written ", manifest.files(r).bytes()));
    }
  }
  return absl::OkStatus();
}

namespace {

// Writes the manifest of save `id` to the disk under its temporary name.
absl::Status WriteTemporary(const Folder& folder, uint64_t id,
                            const std::string& bytes) {
  {
    TESSERA_ASSIGN_OR_RETURN(const File file,
                             folder.CreateFile(TemporaryManifestName(id)));
    TESSERA_RETURN_IF_ERROR(file.WriteAt(0, bytes));
    TESSERA_RETURN_IF_ERROR(file.Sync());
  }
  return folder.Sync();
}

}  // namespace

absl::Status Saving::Commit(const proto::CheckpointManifest& manifest,
                            bool* committed) {
  *committed = false;
  TESSERA_RETURN_IF_ERROR(CheckFiles(manifest));
  TESSERA_ASSIGN_OR_RETURN(const std::string bytes, EncodeManifest(manifest));
  // A manifest that no reader accepts must not replace one that readers accept.
  const absl::Status readable = DecodeManifest(bytes, folder_.path()).status();
  if (!readable.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a manifest that could not be read back is not written: ",
                     readable.message()));
  }
  TESSERA_RETURN_IF_ERROR(WriteTemporary(folder_, id_, bytes));
  absl::Status renamed =
      folder_.Rename(TemporaryManifestName(id_), kManifestName);
  if (!renamed.ok() &&
      absl::IsFailedPrecondition(folder_.OpenFile(kManifestName).status())) {
    // A folder has the name.
    TESSERA_RETURN_IF_ERROR(folder_.Clear(kManifestName));
    renamed = folder_.Rename(TemporaryManifestName(id_), kManifestName);
  }
  // A rename may be done and yet be reported as failed (NFS): where it cannot
  // be seen that it was not, nothing may be removed.
  *committed = renamed.ok() || !OldIsThere();
  TESSERA_RETURN_IF_ERROR(renamed);
  TESSERA_RETURN_IF_ERROR(folder_.Sync());
  // What cannot be removed now is left to the next save.
  (void)Sweep(folder_, id_);
  return absl::OkStatus();
}

// Returns whether the folder certainly holds no checkpoint of this save.
bool Saving::OldIsThere() const {
  const absl::StatusOr<proto::CheckpointManifest> there = ReadManifest(folder_);
  return there.ok() ? there->id() != id_ : absl::IsNotFound(there.status());
}

void Saving::Abandon() {
  const absl::StatusOr<proto::CheckpointManifest> there = ReadManifest(folder_);
  if (there.ok() && there->id() == id_) {
    // Without the manifest the other files mean nothing.
    if (!folder_.Remove(kManifestName).ok() || !folder_.Sync().ok()) return;
  }
  const absl::StatusOr<std::vector<std::string>> names = folder_.Names();
  if (!names.ok()) return;
  bool empty = true;
  for (const std::string& name : *names) {
    if (IdInName(name) == id_) {
      (void)folder_.Remove(name);
    } else {
      empty &= name == kLockName;
    }
  }
  // It is locked meanwhile. Other ranks' files of this save may still come.
  if (!made_ || !empty || !folder_.Remove(kLockName).ok()) return;
  (void)Uninterrupted(
      [&] { return folder_.files()->RemoveFolder(AT_FDCWD, folder_.path()); });
}

absl::Status AddManifest(const Folder& folder,
                         const proto::CheckpointManifest& manifest) {
  if (!absl::IsNotFound(ReadManifest(folder).status())) return absl::OkStatus();
  const absl::StatusOr<File> lock = Lock(folder);
  if (absl::IsUnavailable(lock.status())) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(lock.status());
  if (!absl::IsNotFound(ReadManifest(folder).status())) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(const std::string bytes, EncodeManifest(manifest));
  const std::string temporary = TemporaryManifestName(manifest.id());
  TESSERA_RETURN_IF_ERROR(folder.Remove(temporary));
  TESSERA_RETURN_IF_ERROR(WriteTemporary(folder, manifest.id(), bytes));
  TESSERA_RETURN_IF_ERROR(folder.Rename(temporary, kManifestName));
  return folder.Sync();
}

absl::Status RemoveCheckpoint(const std::string& path, FileSystem* files) {
  TESSERA_ASSIGN_OR_RETURN(const Folder folder, Folder::Open(path, files));
  const absl::Status there = ReadManifest(folder).status();
  if (absl::IsNotFound(there) || absl::IsFailedPrecondition(there)) {
    return there;
  }
  {
    TESSERA_ASSIGN_OR_RETURN(const File lock, Lock(folder));
    // The manifest goes first: without it the other files mean nothing, and are
    // not a checkpoint that lacks files.
    TESSERA_RETURN_IF_ERROR(folder.Clear(kManifestName));
    TESSERA_RETURN_IF_ERROR(folder.Sync());
    TESSERA_RETURN_IF_ERROR(Sweep(folder, std::nullopt));
    TESSERA_RETURN_IF_ERROR(folder.Remove(kLockName));
  }
  (void)Uninterrupted([&] { return files->RemoveFolder(AT_FDCWD, path); });
  return absl::OkStatus();
}

absl::Status RemoveUnfinished(const std::string& path, FileSystem* files) {
  TESSERA_ASSIGN_OR_RETURN(const Folder folder, Folder::Open(path, files));
  {
    TESSERA_ASSIGN_OR_RETURN(const File lock, Lock(folder));
    if (!absl::IsNotFound(ReadManifest(folder).status())) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, ": holds a manifest"));
    }
    TESSERA_RETURN_IF_ERROR(Sweep(folder, std::nullopt));
    TESSERA_RETURN_IF_ERROR(folder.Remove(kLockName));
  }
  (void)Uninterrupted([&] { return files->RemoveFolder(AT_FDCWD, path); });
  return absl::OkStatus();
}

}  // namespace tessera
