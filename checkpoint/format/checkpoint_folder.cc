#include "checkpoint/format/checkpoint_folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera {
namespace {

constexpr int64_t kMaxManifestBytes = int64_t{2} << 30;

uint64_t RandomId() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

// Removes the files of all saves but `kept`.
absl::Status Sweep(const Folder& folder, std::optional<uint64_t> kept) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                           folder.Names());
  for (const std::string& name : names) {
    const std::optional<uint64_t> id = IdInName(name);
    if (!id.has_value() || id == kept) continue;
    TESSERA_RETURN_IF_ERROR(folder.Remove(name));
  }
  return absl::OkStatus();
}

// For who gives the folder of a run's checkpoints: where the newest one is.
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
  TESSERA_RETURN_IF_ERROR(file.status());
  if (file->bytes() > kMaxManifestBytes) {
    return absl::DataLossError(absl::StrCat(
        file->path(), ": has ", file->bytes(), " bytes, which none has"));
  }
  std::string bytes(static_cast<size_t>(file->bytes()), '\0');
  TESSERA_RETURN_IF_ERROR(file->ReadAt(0, bytes.data(), file->bytes()));
  return DecodeManifest(bytes, file->path());
}

namespace {

// The lock of `folder`, until the file is closed.
absl::StatusOr<File> Lock(const Folder& folder) {
  TESSERA_ASSIGN_OR_RETURN(File lock, folder.OpenOrCreateFile(kLockName));
  const absl::Status locked = lock.Lock();
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

absl::StatusOr<Saving> Saving::Begin(const std::string& path,
                                     FileSystem* files) {
  TESSERA_ASSIGN_OR_RETURN(Folder folder, Folder::Make(path, files));
  TESSERA_ASSIGN_OR_RETURN(File lock, Lock(folder));
  // Nothing is swept where the manifest cannot be read: its files may be all
  // that is left of a checkpoint. What is no manifest at all is not replaced.
  const absl::StatusOr<proto::CheckpointManifest> there = ReadManifest(folder);
  if (absl::IsFailedPrecondition(there.status())) {
    return Annotate(there.status(), "nothing is saved over it");
  }
  if (there.ok() || absl::IsNotFound(there.status())) {
    TESSERA_RETURN_IF_ERROR(
        Sweep(folder, there.ok() ? std::optional<uint64_t>(there->id())
                                 : std::nullopt));
  }
  return Saving(std::move(folder), std::move(lock), RandomId());
}

absl::StatusOr<Saving> Saving::BeginPart(const std::string& path, bool replace,
                                         FileSystem* files) {
  TESSERA_ASSIGN_OR_RETURN(Folder folder, Folder::Make(path, files));
  TESSERA_ASSIGN_OR_RETURN(File lock, Lock(folder));
  const absl::Status there = ReadManifest(folder).status();
  if (replace || absl::IsNotFound(there)) {
    return Saving(std::move(folder), std::move(lock), RandomId());
  }
  if (!there.ok() && !absl::IsDataLoss(there)) return there;
  // No rename commits in several folders at once.
  return absl::FailedPreconditionError(absl::StrCat(
      path,
      ": holds a checkpoint; with checkpoint.use_node_local_storage none can "
      "take its place, so save to another folder each time, as "
      "CheckpointManager does"));
}

absl::Status Saving::ClearPart() {
  TESSERA_RETURN_IF_ERROR(folder_.Remove(kManifestName));
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

// The manifest of save `id`, on the disk under its temporary name.
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
  // What no reader would take must not replace what one does.
  const absl::Status readable = DecodeManifest(bytes, folder_.path()).status();
  if (!readable.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a manifest that could not be read back is not written: ",
                     readable.message()));
  }
  TESSERA_RETURN_IF_ERROR(WriteTemporary(folder_, id_, bytes));
  const absl::Status renamed =
      folder_.Rename(TemporaryManifestName(id_), kManifestName);
  // A rename may be done and yet be reported as failed (NFS): where it cannot
  // be seen that it was not, nothing may be removed.
  *committed = renamed.ok() || !OldIsThere();
  TESSERA_RETURN_IF_ERROR(renamed);
  TESSERA_RETURN_IF_ERROR(folder_.Sync());
  // What cannot be removed now is left to the next save.
  (void)Sweep(folder_, id_);
  return absl::OkStatus();
}

// The folder certainly holds no checkpoint of this save.
bool Saving::OldIsThere() const {
  const absl::StatusOr<proto::CheckpointManifest> there = ReadManifest(folder_);
  return there.ok() ? there->id() != id_ : absl::IsNotFound(there.status());
}

void Saving::Abandon() {
  const absl::StatusOr<proto::CheckpointManifest> there = ReadManifest(folder_);
  if (there.ok() && there->id() == id_) {
    // Without it the rest is rubbish.
    if (!folder_.Remove(kManifestName).ok() || !folder_.Sync().ok()) return;
  }
  const absl::StatusOr<std::vector<std::string>> names = folder_.Names();
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    if (IdInName(name) == id_) (void)folder_.Remove(name);
  }
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
    // The manifest first: without it the rest is rubbish, and not a checkpoint
    // that lacks files.
    TESSERA_RETURN_IF_ERROR(folder.Remove(kManifestName));
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
