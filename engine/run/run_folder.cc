#include "engine/run/run_folder.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "checkpoint/disk/folder.h"
#include "checkpoint/local_folders.h"
#include "checkpoint/together.h"

namespace tessera {
namespace {

constexpr char kWhere[] = "CheckpointManager";
constexpr absl::Duration kBeat = absl::Milliseconds(100);

absl::StatusOr<bool> Leads(const std::string& dir, FolderHolds holds,
                           Communicator* comm) {
  if (holds == FolderHolds::kAll) return comm->rank() == 0;
  absl::StatusOr<Folder> folder = absl::UnknownError("not opened");
  TESSERA_RETURN_IF_ERROR(RunTogether(comm, kWhere, [&] {
    folder = Folder::Make(dir, FileSystem::Real());
    return folder.status();
  }));
  TESSERA_ASSIGN_OR_RETURN(const std::vector<int> leaders,
                           FindLeaders(*folder, comm));
  return leaders[static_cast<size_t>(comm->rank())] == comm->rank();
}

// Makes a file there, and removes it. A disk that is full may have room when
// something is saved.
absl::Status TryToWrite(const std::string& dir) {
  const std::string name = absl::StrCat(kRunLockName, ".try");
  const absl::StatusOr<Folder> folder = Folder::Make(dir, FileSystem::Real());
  const absl::Status made =
      folder.ok() ? folder->OpenOrCreateFile(name).status() : folder.status();
  if (IsDiskFull(made)) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(made);
  return folder->Remove(name);
}

bool HoldsCheckpoints(const std::string& dir) {
  const auto steps = ListStepFolders(dir, FileSystem::Real());
  return steps.ok() && !steps->empty();
}

// OK where a job can do without the lock that could not be taken.
absl::Status GoWithoutLock(const RunFolderOptions& options,
                           const absl::Status& unlocked) {
  const absl::Status written = TryToWrite(options.dir);
  if (written.ok()) {
    TESSERA_LOG(WARNING) << unlocked.message()
                         << "; another job that saves there would not be "
                            "noticed";
    return absl::OkStatus();
  }
  if (!options.saves && HoldsCheckpoints(options.dir)) {
    TESSERA_LOG(WARNING) << written.message()
                         << "; checkpoints can be loaded from this folder, "
                            "but none can be saved there";
    return absl::OkStatus();
  }
  return absl::Status(
      written.code(),
      absl::StrCat(options.dir, ": no checkpoint can be saved there (",
                   written.message(),
                   "); give a folder that this user can write to "
                   "(CheckpointManagerOptions::dir, checkpoint.folder)"));
}

// Null: it cannot be locked.
absl::StatusOr<std::unique_ptr<RunLock>> Take(const RunFolderOptions& options) {
  const absl::Duration end = MonotonicNow() + options.wait;
  for (bool told = false;; told = true) {
    auto lock = RunLock::Take(options.dir, FileSystem::Real());
    if (lock.ok()) return std::make_unique<RunLock>(*std::move(lock));
    if (!absl::IsUnavailable(lock.status())) {
      TESSERA_RETURN_IF_ERROR(GoWithoutLock(options, lock.status()));
      return nullptr;
    }
    if (MonotonicNow() >= end) return lock.status();
    if (!told) {
      TESSERA_LOG(WARNING) << lock.status().message() << "; waiting up to "
                           << absl::FormatDuration(options.wait);
    }
    absl::SleepFor(kBeat);
  }
}

}  // namespace

absl::StatusOr<RunFolder> TakeRunFolder(const RunFolderOptions& options,
                                        Communicator* comm) {
  RunFolder taken;
  TESSERA_ASSIGN_OR_RETURN(taken.leads,
                           Leads(options.dir, options.holds, comm));
  TESSERA_RETURN_IF_ERROR(RunTogether(comm, kWhere, [&]() -> absl::Status {
    if (!taken.leads) return absl::OkStatus();
    TESSERA_ASSIGN_OR_RETURN(taken.lock, Take(options));
    return absl::OkStatus();
  }));
  return taken;
}

}  // namespace tessera
