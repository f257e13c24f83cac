#include "checkpoint/format/run_lock.h"

#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"

namespace tessera {
namespace {

// The text has a fixed length, so that it replaces a previous holder's text
// whole.
constexpr size_t kTextBytes = 512;

std::string Self() {
  char host[HOST_NAME_MAX + 1] = {};
  if (gethostname(host, HOST_NAME_MAX) != 0) host[0] = '\0';
  return absl::StrCat("process ", getpid(), " on host ", host, " since ");
}

std::string SelfAndNow() {
  std::string text =
      absl::StrCat(Self(), absl::FormatTime("%Y-%m-%d %H:%M:%S UTC",
                                            absl::Now(), absl::UTCTimeZone()));
  text.resize(kTextBytes - 1, ' ');
  return absl::StrCat(text, "\n");
}

// Returns what the file says; it may be in the middle of being written.
std::string HolderIn(const File& file) {
  std::string text(static_cast<size_t>(std::min<int64_t>(
                       file.bytes(), static_cast<int64_t>(kTextBytes))),
                   '\0');
  if (!file.ReadAt(0, text.data(), static_cast<int64_t>(text.size())).ok()) {
    text.clear();
  }
  absl::StripTrailingAsciiWhitespace(&text);
  const bool printable =
      std::all_of(text.begin(), text.end(), absl::ascii_isprint);
  return text.empty() || !printable ? "another process" : text;
}

}  // namespace

absl::StatusOr<RunLock> RunLock::Take(const std::string& dir,
                                      FileSystem* files) {
  TESSERA_ASSIGN_OR_RETURN(const Folder folder, Folder::Make(dir, files));
  TESSERA_ASSIGN_OR_RETURN(File file, folder.OpenOrCreateFile(kRunLockName));
  const absl::Status locked = file.Lock();
  if (absl::IsAlreadyExists(locked)) {
    const std::string holder = HolderIn(file);
    return absl::UnavailableError(absl::StrCat(
        dir, ": ", holder, " saves its checkpoints there (it holds ",
        kRunLockName, "); ",
        absl::StartsWith(holder, Self())
            ? "that is this process: destroy its CheckpointManager there "
              "first, "
              "or give each a folder of its own"
            : "give each job a folder of its own, or wait until that one has "
              "ended (CheckpointManagerOptions::wait_for_folder; a host that "
              "is gone keeps its lock on NFS for a while)",
        "; Engine::LoadCheckpoint reads without the lock"));
  }
  if (!locked.ok()) {
    // The code of ENOLCK would be that of a lock that another job holds.
    return absl::UnimplementedError(
        absl::StrCat("the folder cannot be locked: ", locked.message()));
  }
  // The text is for people, so errors do not matter; a disk may be full.
  (void)file.WriteAt(0, SelfAndNow());
  return RunLock(std::move(file));
}

}  // namespace tessera
