#include "engine/run/run_folder.h"

#include <utility>
#include <vector>

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

// Null: it cannot be locked, as a folder that is only loaded from, perhaps.
absl::StatusOr<std::unique_ptr<RunLock>> Take(const std::string& dir,
                                              absl::Duration wait) {
  const absl::Duration end = MonotonicNow() + wait;
  for (bool told = false;; told = true) {
    auto lock = RunLock::Take(dir, FileSystem::Real());
    if (lock.ok()) return std::make_unique<RunLock>(*std::move(lock));
    if (!absl::IsUnavailable(lock.status())) {
      TESSERA_LOG(WARNING) << lock.status().message()
                           << "; another job that saves there would not be "
                              "noticed";
      return nullptr;
    }
    if (MonotonicNow() >= end) return lock.status();
    if (!told) {
      TESSERA_LOG(WARNING) << lock.status().message() << "; waiting up to "
                           << absl::FormatDuration(wait);
    }
    absl::SleepFor(kBeat);
  }
}

}  // namespace

absl::StatusOr<RunFolder> TakeRunFolder(const std::string& dir,
                                        FolderHolds holds, absl::Duration wait,
                                        Communicator* comm) {
  RunFolder taken;
  TESSERA_ASSIGN_OR_RETURN(taken.leads, Leads(dir, holds, comm));
  TESSERA_RETURN_IF_ERROR(RunTogether(comm, kWhere, [&]() -> absl::Status {
    if (!taken.leads) return absl::OkStatus();
    TESSERA_ASSIGN_OR_RETURN(taken.lock, Take(dir, wait));
    return absl::OkStatus();
  }));
  return taken;
}

}  // namespace tessera
